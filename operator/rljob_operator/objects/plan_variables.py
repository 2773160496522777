"""Environment variables that pass the supported settings of the memory plan to another trainer."""

from __future__ import annotations

from collections.abc import Collection

from pydantic.alias_generators import to_snake

from rljob_api.memory_plan import MemoryPlan
from rljob_memory.recovery.plan_text import name_of

_BY_THE_ALLOCATOR = "expandable_segments"
"""torch reads this one by itself, from PYTORCH_CUDA_ALLOC_CONF."""


def plan_variables(plan: MemoryPlan | None, supported_settings: Collection[str]) -> dict[str, str]:
    """Variables such as RLJOB_PLAN_MICRO_BATCH_TOKENS, for the settings whose names are in `supported_settings`.

    Switches are "1" and "0", sizes are bytes. Empty if there is no plan yet.
    """
    if plan is None:
        return {}
    return {
        f"RLJOB_PLAN_{to_snake(name_of(name)).upper()}": _text(getattr(plan, name))
        for name, field in MemoryPlan.model_fields.items()
        if field.alias in supported_settings and name != _BY_THE_ALLOCATOR
    }


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
