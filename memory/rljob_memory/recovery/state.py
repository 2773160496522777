"""State of a job's recovery: the current memory plan, the changes that led to it, and the budgets used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import PlanChange
from rljob_memory.plan_settings import texts_of

PROCESSES = "processes"
"""Name of the setting in a change that leaves the plan as it is and renews all processes."""

ENGINE_PROCESSES = "engineProcesses"
"""The same for the processes of the engines alone."""

POLICY_PROCESSES = "policyProcesses"
"""The same for the processes of the policy."""

NOT_OF_THE_PLAN = frozenset({PROCESSES, ENGINE_PROCESSES, POLICY_PROCESSES})

POLICY_GPUS = "policyGpus"
"""Name of the setting in a change that grows the policy."""

STEPS_THAT_FORGIVE = 10
"""Committed steps, or half of the steps that remained if that is fewer, that give one adjustment or restart back."""

SET_ON_PODS: dict[str, Any] = {
    "host_memory_bytes": None,
    "controller_host_memory_bytes": None,
    "shared_memory_bytes": None,
    "excluded_nodes": [],
    "policy_gpus": None,
}
"""Settings that the operator applies to pods, with their first values. A trainer, which runs the user's code, does not
decide them."""


@dataclass(frozen=True, slots=True)
class RecoveryState:
    """Immutable. An answer to a failure contains the state after it."""

    plan: MemoryPlan | None
    """The current plan; None until a trainer has computed the first one."""
    steps: int
    """Steps of the job."""
    changes: tuple[PlanChange, ...] = ()
    """Oldest first; old ones may be missing."""
    adjustments: int = 0
    """Changes that count against `recovery.maxAdjustments`, as stored. `effective_adjustments` takes the
    progress since into account."""
    restarts: int = 0
    """Restarts that count against `recovery.maxRestarts`, as stored."""
    committed_step: int = 0
    """The last committed step, 0 before the first."""
    first_step: int = 1
    """First step of the current attempt, or since a process of it was replaced."""
    first_attempt: int = 1
    """First attempt that counts. A person has resumed the job after the failures of earlier ones."""
    failure_without_progress: str = ""
    """Message of the previous attempt's failure, if it committed no step and the failure may repeat itself."""

    @classmethod
    def replayed(
        cls, plan: MemoryPlan | None, changes: Iterable[PlanChange], *, committed_step: int, steps: int
    ) -> RecoveryState:
        """The state of a job that made `changes`, oldest first, if no count of them is stored."""
        state = cls(plan, steps)
        for change in changes:
            state = replace(state, committed_step=change.step - 1).with_change(change, plan)
        return replace(state, committed_step=committed_step)

    # --- budgets ---

    @property
    def effective_adjustments(self) -> int:
        """`adjustments`, less one that progress since the latest change has given back."""
        latest = latest_answer(self.changes)
        return self.adjustments if latest is None else self._less_forgiven(self.adjustments, latest.step)

    @property
    def effective_restarts(self) -> int:
        """`restarts`, less one that the progress of the current attempt has given back."""
        return self._less_forgiven(self.restarts, self.first_step)

    @property
    def changes_since_progress(self) -> int:
        """Changes after failures, all made since the last commit."""
        answers = (change for change in self.changes if not change.preventive and change.attempt >= self.first_attempt)
        return sum(change.step > self.committed_step for change in answers)

    @property
    def attempt_committed_steps(self) -> int:
        return max(0, self.committed_step - self.first_step + 1)

    def _less_forgiven(self, count: int, since_step: int) -> int:
        """`count` less one if enough steps are committed, counted from `since_step`."""
        committed = self.committed_step - since_step + 1
        remained = self.steps - since_step + 1
        forgiven = committed >= 1 and committed >= min(STEPS_THAT_FORGIVE, -(-remained // 2))
        return max(0, count - 1) if forgiven else count

    # --- transitions ---

    def with_change(self, change: PlanChange, plan: MemoryPlan | None) -> RecoveryState:
        """The state after `change` led to `plan`. A change before any failure changes no count."""
        changed = replace(self, plan=plan, changes=(*self.changes, change))
        if change.preventive:
            return changed
        return replace(changed, adjustments=self.effective_adjustments + counts(change))

    def with_restart(self, failure_without_progress: str = "") -> RecoveryState:
        """The state after a restart under the same plan."""
        return replace(self, restarts=self.effective_restarts + 1, failure_without_progress=failure_without_progress)

    def with_replacement(self) -> RecoveryState:
        """The state after a lost process was replaced within the attempt: progress counts from there on."""
        return replace(self.with_restart(), first_step=self.committed_step + 1)

    def with_effect(self, change: PlanChange) -> RecoveryState:
        """The state once the effect of `change`, one of `changes`, is known."""
        same = (change.generation, change.remedy.setting)
        changes = (change if (each.generation, each.remedy.setting) == same else each for each in self.changes)
        return replace(self, changes=tuple(changes))

    def merge(
        self, plan: MemoryPlan | None, changes: Sequence[PlanChange], *, decides_pods: bool = True
    ) -> RecoveryState:
        """This state of the supervisor, merged with the plan and the changes that a trainer made on its own.

        The plan of the higher generation becomes current. `decides_pods`: with the settings of pods of this state;
        False if there is no supervisor. Of two changes of one generation, the supervisor's wins. The effect of a change
        is taken from the trainer.
        """
        merged, known = self, self.plan.generation if self.plan else 0
        if plan is not None and plan.generation > known:
            # The API server refuses a status with several changes of one generation, so keep one of them.
            new = {change.generation: change for change in changes if known < change.generation <= plan.generation}
            for generation in sorted(new):
                merged = replace(merged, committed_step=new[generation].step - 1).with_change(new[generation], None)
            of_pods = {name: getattr(self.plan, name, first) for name, first in SET_ON_PODS.items() if decides_pods}
            merged = replace(merged, plan=plan.model_copy(update=of_pods), committed_step=self.committed_step)
        reported = {(change.generation, change.remedy.setting): change for change in changes}
        learned = (
            _with_reported_effect(change, reported.get((change.generation, change.remedy.setting), change))
            for change in merged.changes
        )
        return replace(merged, changes=tuple(learned))

    # --- the past ---

    def was_current(self, texts: Mapping[str, str]) -> bool:
        """True if a plan with these texts (`plan_text.texts_of`) came before the current plan."""
        assert self.plan is not None
        earlier = texts_of(self.plan)
        for change in reversed(self.changes):
            if change.remedy.setting not in NOT_OF_THE_PLAN:
                earlier[change.remedy.setting] = change.remedy.before
            if earlier == texts:
                return True
        return False


def counts(change: PlanChange) -> bool:
    """True if `change` counts against `recovery.maxAdjustments`: it answers a failure, and has no bound of its own."""
    return not change.preventive and change.remedy.setting != POLICY_GPUS


def latest_answer(changes: Sequence[PlanChange]) -> PlanChange | None:
    """The latest change that answers a failure; a preventive change answers none."""
    return next((change for change in reversed(changes) if not change.preventive), None)


def _with_reported_effect(change: PlanChange, reported: PlanChange) -> PlanChange:
    remedy = change.remedy
    if remedy.observed_bytes is None and reported.remedy.observed_bytes is not None:
        remedy = remedy.model_copy(update={"observed_bytes": reported.remedy.observed_bytes})
    seconds = reported.seconds_to_recover if change.seconds_to_recover is None else change.seconds_to_recover
    return change.model_copy(update={"remedy": remedy, "seconds_to_recover": seconds})
