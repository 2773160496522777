"""The memory plan of the next attempt."""

from __future__ import annotations

from rljob_api.memory_plan import MemoryPlan
from rljob_memory.other_trainer import other_trainers_first_plan
from rljob_memory.recovery.facts import shares_gpu
from rljob_memory.recovery.pins import with_pins
from rljob_operator.reconcile.view import JobView


def plan_for_next_attempt(view: JobView, plan: MemoryPlan | None) -> MemoryPlan | None:
    """`plan`, the one in force, with the settings that the user has pinned since.

    None if there is no plan yet: RLJob's own trainer computes the first one.
    """
    if plan is None:
        return None if view.own_trainer else other_trainers_first_plan(view.spec)
    reported = shares_gpu(view.report.memory_profile if view.report else None)
    return with_pins(plan, view.spec.memory, shares_gpu=reported if view.own_trainer else True)
