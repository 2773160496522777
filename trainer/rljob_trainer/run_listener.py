"""The interface through which a run reports its progress. The base class ignores every report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rljob_api.memory_facts import MemoryFacts
from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import Phase, PlanChange
from rljob_api.step_report import Evidence, MemoryPressure, TrainingWarning
from rljob_client.run_directory.records import EvaluationRecord, StepRecord
from rljob_client.run_directory.summary import Summary
from rljob_memory.sample import MemorySample
from rljob_trainer.rollout_batch import Completion, Prompt, RolloutBatch


class RunListener:
    """Called from the controller's thread, between the phases of a step. The methods must not block."""

    def memory_facts_found(self, facts: MemoryFacts, changes: Sequence[PlanChange]) -> None:
        """Model and machine of the memory plan, and its changes in earlier attempts. Called before `attempt_began`."""

    def attempt_began(self, plan: MemoryPlan, committed: Sequence[StepRecord], warn: Callable[[str], None]) -> None:
        """Called before any role starts, once the memory plan of the attempt is known.

        `committed`: the steps of earlier attempts. `warn`: displays a warning, from any thread.
        """

    def phase_began(self, step: int, phase: Phase) -> None:
        """Called before `phase` of `step`. All roles are running."""

    def step_scored(self, batch: RolloutBatch, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> None:
        """Called after the rewards of a step are known, before its update. After a failure, it may be called again.

        `prompts` and `completions`: those of `batch`, in its order, with their text.
        """

    def step_committed(self, record: StepRecord, memory: Mapping[str, Mapping[Phase, MemorySample]]) -> None:
        """Called after each commit. `memory`: peaks by actor name and phase."""

    def evaluation_scored(
        self, step: int, rewards: Sequence[float], prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> None:
        """Called before `evaluated`, with the responses of the evaluation after `step` (0: the initial model), prompt
        after prompt, each with its reward."""

    def evaluated(self, record: EvaluationRecord) -> None:
        """Called after each evaluation. Its record is in the ledger."""

    def failed(self, evidence: Evidence) -> None:
        """Called when memory runs out. If the attempt recovers, `recovered` is called later."""

    def plan_changed(self, change: PlanChange, plan: MemoryPlan) -> None:
        """Called after a change of the memory plan was recorded, before it takes effect."""

    def recovered(self, change: PlanChange) -> None:
        """Called after the failed phase has succeeded. `change` contains the observed effect."""

    def pressure(self, pressure: MemoryPressure | None) -> None:
        """Called after each step: the projected out-of-memory failure, or None."""

    def training_warning(self, warning: TrainingWarning | None) -> None:
        """Called after each step: the gravest problem of the step, or None."""

    def finished(self, summary: Summary) -> None:
        """Called once, when the run is complete, stopped or failed."""


class Listeners(RunListener):
    """Passes each report to several listeners, in their order."""

    def __init__(self, *listeners: RunListener) -> None:
        self._listeners = listeners


def _passed_on(method: str) -> Callable[..., None]:
    def call(self: Listeners, *args: Any, **kwargs: Any) -> None:
        for listener in self._listeners:
            getattr(listener, method)(*args, **kwargs)

    return call


for _method in [name for name in vars(RunListener) if not name.startswith("_")]:
    setattr(Listeners, _method, _passed_on(_method))
