"""The memory plan of a job's next attempt, as far as it is known before the attempt begins."""

from __future__ import annotations

from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_api.memory_profile import MemoryProfile
from rljob_memory.other_trainer import other_trainers_first_plan
from rljob_memory.recovery.pins import with_pins
from rljob_memory.recovery.profile import shares_gpu


def plan_of_next_attempt(spec: RLJobSpec, plan: MemoryPlan | None, profile: MemoryProfile | None) -> MemoryPlan | None:
    """`plan`, the one in force, with the settings that the user has pinned since.

    None if there is no plan yet: RLJob's own trainer computes the first one.
    """
    if plan is None:
        return None if spec.trainer is None else other_trainers_first_plan(spec)
    # Another trainer reports no profile; it gets every pinned setting that it reads.
    return with_pins(plan, spec.memory, shares_gpu=shares_gpu(profile) if spec.trainer is None else True)
