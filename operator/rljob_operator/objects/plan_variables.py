"""Environment variables that pass the supported settings of the memory plan to another trainer."""

from __future__ import annotations

from collections.abc import Collection

from rljob_api.memory_plan import MemoryPlan

_BY_THE_ALLOCATOR = "expandable_segments"
"""torch reads this one by itself, from PYTORCH_CUDA_ALLOC_CONF."""


def plan_variables(plan: MemoryPlan | None, supported_settings: Collection[str]) -> dict[str, str]:
    """RLJOB_PLAN_MICRO_BATCH_TOKENS: "4096" and the like, for the settings in `supported_settings`, spelled as in the
    manifest; switches are "1" and "0". None where there is no plan yet."""
    if plan is None:
        return {}
    return {
        f"RLJOB_PLAN_{name.upper()}": str(int(getattr(plan, name)))
        for name, field in MemoryPlan.model_fields.items()
        if field.alias in supported_settings and name != _BY_THE_ALLOCATOR
    }
