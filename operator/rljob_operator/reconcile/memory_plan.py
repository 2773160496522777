"""The memory plan of the next attempt: the one in force, with what the user pinned since."""

from __future__ import annotations

from typing import Any

from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_memory.other_trainer import other_trainers_first_plan
from rljob_memory.recovery.pins import pinned_values


def plan_for_next_attempt(spec: RLJobSpec, plan: MemoryPlan | None) -> MemoryPlan | None:
    """`plan` itself, or one of the next generation where `spec.memory` pins a setting to another value.

    None where there is no plan yet: the trainer works the first one out, unless it is another one than RLJob's own.
    """
    if plan is None:
        return None if spec.trainer is None else other_trainers_first_plan(spec)
    pinned = {name: value for name, value in _pinned_settings(spec).items() if value != getattr(plan, name)}
    return plan.model_copy(update={"generation": plan.generation + 1, **pinned}) if pinned else plan


def _pinned_settings(spec: RLJobSpec) -> dict[str, Any]:
    pinned = pinned_values(spec.memory)
    if spec.topology != "Colocated" or spec.policy.gpus_per_replica == 0:
        pinned.pop("rollout_sleep_level", None)  # the engine has nobody to make room for
    return pinned
