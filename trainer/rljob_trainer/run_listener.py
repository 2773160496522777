"""The interface through which a run reports its progress. The base class ignores every report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rljob_api.memory_plan import MemoryPlan
from rljob_api.memory_profile import MemoryProfile
from rljob_api.plan_change import Phase, PlanChange
from rljob_api.step_report import Evidence, MemoryPressure
from rljob_memory.sample import MemorySample
from rljob_trainer.ledger.records import StepRecord


class RunListener:
    """Called from the controller's thread, between the phases of a step. The methods must not block."""

    def memory_profile_found(self, profile: MemoryProfile, changes: Sequence[PlanChange]) -> None:
        """The bounds of the memory plan, and its changes in earlier attempts. Called before `attempt_began`."""

    def attempt_began(self, plan: MemoryPlan, committed: Sequence[StepRecord], warn: Callable[[str], None]) -> None:
        """The attempt's memory plan is known; no role has started.

        `committed`: the steps of earlier attempts. `warn`: displays a warning, from any thread.
        """

    def phase_began(self, step: int, phase: Phase) -> None:
        """The roles are up, and work on `step`."""

    def step_committed(self, record: StepRecord, memory: Mapping[str, Mapping[Phase, MemorySample]]) -> None:
        """`memory`: by actor name and the phase that the peaks are about."""

    def failed(self, evidence: Evidence) -> None:
        """Memory ran out. A later call reports whether the attempt recovered."""

    def plan_changed(self, change: PlanChange, plan: MemoryPlan) -> None:
        """The memory plan was changed. The change is recorded, but not yet in effect."""

    def recovered(self, change: PlanChange) -> None:
        """The failed phase has completed. `change` contains the observed effect."""

    def pressure(self, pressure: MemoryPressure | None) -> None:
        """Called after each step: the projected out-of-memory failure, or None."""
