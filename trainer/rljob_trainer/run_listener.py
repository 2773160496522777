"""Who is told how a run goes. The base class is the listener of a run that nobody else follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rljob_api.memory_plan import MemoryPlan
from rljob_api.memory_profile import MemoryProfile
from rljob_api.plan_change import Phase, PlanChange
from rljob_api.step_report import Evidence, MemoryPressure
from rljob_memory.sample import MemorySample
from rljob_trainer.ledger.records import StepRecord


class RunListener:
    """Called from the controller's own thread, between the phases of a step: its methods return at once."""

    def memory_profile_found(self, profile: MemoryProfile, changes: Sequence[PlanChange]) -> None:
        """What bounds the memory plan, and its changes in earlier attempts. Told before `attempt_began`."""

    def attempt_began(self, plan: MemoryPlan, committed: Sequence[StepRecord], warn: Callable[[str], None]) -> None:
        """The attempt's memory plan is made; no role has started. `committed`: the steps of earlier attempts.

        `warn` shows a line to people, from any thread.
        """

    def phase_began(self, step: int, phase: Phase) -> None:
        """The roles are up, and work on `step`."""

    def step_committed(self, record: StepRecord, memory: Mapping[str, Mapping[Phase, MemorySample]]) -> None:
        """`memory`: by actor name and the phase that the peaks are about."""

    def failed(self, evidence: Evidence) -> None:
        """Memory ran out. Whether the attempt goes on is told by what follows."""

    def plan_changed(self, change: PlanChange, plan: MemoryPlan) -> None:
        """The memory plan was changed; the change is written down, and not yet in force."""

    def recovered(self, change: PlanChange) -> None:
        """The phase that had failed is done. `change` says what it brought."""

    def pressure(self, pressure: MemoryPressure | None) -> None:
        """Told after each step: whether memory will run out, if it goes on like this."""
