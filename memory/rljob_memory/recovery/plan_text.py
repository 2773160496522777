"""Settings of the plan in the status: names as in the manifest, values as short texts."""

from __future__ import annotations

from rljob_api.memory_plan import MemoryPlan

_LONGEST_TEXT = 64


def name_of(setting: str) -> str:
    """`kvCacheBytes` for the plan's field `kv_cache_bytes`."""
    return MemoryPlan.model_fields[setting].alias or setting


def texts_of(plan: MemoryPlan) -> dict[str, str]:
    """Every setting of `plan` by its name; the generation is none."""
    return {name_of(field): text_of(getattr(plan, field)) for field in MemoryPlan.model_fields if field != "generation"}


def text_of(value: object) -> str:
    """A setting's value in at most 64 characters."""
    match value:
        case None:
            return "default"
        case bool():
            return "true" if value else "false"
        case list():
            nodes = ", ".join(map(str, value)) or "none"
            return nodes if len(nodes) <= _LONGEST_TEXT else f"{len(value)} nodes"
        case _:
            return str(value)


def is_size(name: str) -> bool:
    """True if the setting `name` counts bytes."""
    return name in _SIZES


_SIZES = frozenset(name_of(field) for field in MemoryPlan.model_fields if field.endswith("_bytes"))
