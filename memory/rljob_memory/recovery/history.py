"""The changes of the plan so far: how many count, and what they led to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import PlanChange
from rljob_memory.recovery.plan_text import texts_of

PROCESSES = "processes"
"""Stands where a change names its setting, and only the processes are new ones: the plan is the same."""

STEPS_THAT_FORGIVE_AN_ADJUSTMENT = 10
"""So many steps committed since the last change, or half of those that remained then, give one adjustment back."""


@dataclass(frozen=True, slots=True)
class History:
    """`changes`: oldest first; old ones may be missing. `adjustments`: how many count against
    `recovery.maxAdjustments`. `committed_step`: the last committed step, 0 before the first."""

    changes: tuple[PlanChange, ...] = ()
    adjustments: int = 0
    committed_step: int = 0

    @property
    def changes_since_progress(self) -> int:
        """Changes after failures, all made since the last commit."""
        return sum(not change.preventive and change.step > self.committed_step for change in self.changes)

    def was_in_force(self, texts: Mapping[str, str], plan: MemoryPlan) -> bool:
        """Whether a plan of `texts` (`plan_text.texts_of`) led to `plan`, the one in force: undoes change by change."""
        earlier = texts_of(plan)
        for change in reversed(self.changes):
            if change.remedy.setting != PROCESSES:
                earlier[change.remedy.setting] = change.remedy.before
            if earlier == texts:
                return True
        return False


def history_of(changes: Iterable[PlanChange], *, committed_step: int, steps: int) -> History:
    """The history of a job of `steps` steps that made `changes`, oldest first, where nobody has counted them yet."""
    history = History()
    for change in changes:
        history = with_change(replace(history, committed_step=change.step - 1), change, steps)
    return replace(history, committed_step=committed_step)


def with_change(history: History, change: PlanChange, steps: int) -> History:
    """`history` after `change`, in a job of `steps` steps: what progress gave back before it is taken off, and it
    counts, unless it was made before anything failed."""
    if change.preventive:
        return replace(history, changes=(*history.changes, change))
    adjustments = adjustments_left_standing(history, steps) + 1
    return replace(history, changes=(*history.changes, change), adjustments=adjustments)


def adjustments_left_standing(history: History, steps: int) -> int:
    """`history.adjustments` after progress since the last change gave one back, in a job of `steps` steps.

    Tell `decide` of this number, and store none but `with_change` makes: it would be given back twice.
    """
    latest = next((change for change in reversed(history.changes) if not change.preventive), None)
    if latest is None:
        return history.adjustments
    committed = history.committed_step - latest.step + 1
    remained = steps - latest.step + 1
    forgiven = committed >= 1 and committed >= min(STEPS_THAT_FORGIVE_AN_ADJUSTMENT, -(-remained // 2))
    return max(0, history.adjustments - 1) if forgiven else history.adjustments
