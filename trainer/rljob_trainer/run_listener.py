"""Who is told how a run goes. The base class is the listener of a run that nobody else follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rljob_api.memory_plan import MemoryPlan
from rljob_api.step_report import Phase
from rljob_trainer.ledger.records import StepRecord
from rljob_trainer.telemetry.memory import MemorySample


class RunListener:
    """Called from the controller's own thread, between the phases of a step: its methods return at once."""

    def attempt_began(self, plan: MemoryPlan, committed: Sequence[StepRecord], warn: Callable[[str], None]) -> None:
        """The attempt's memory plan is made; no role has started. `committed`: the steps of earlier attempts.

        `warn` shows a line to people, from any thread.
        """

    def phase_began(self, step: int, phase: Phase) -> None:
        """The roles are up, and work on `step`."""

    def step_committed(self, record: StepRecord, memory: Mapping[str, Mapping[Phase, MemorySample]]) -> None:
        """`memory`: by actor name and the phase that the peaks are about."""
