"""Names and values of the plan's settings as the manifest writes them."""

from __future__ import annotations

from rljob_api.memory_plan import MemoryPlan
from rljob_api.quantity import byte_quantity

_LONGEST_TEXT = 64


def name_of(setting: str) -> str:
    """`kvCache` for the plan's field `kv_cache_bytes`."""
    return MemoryPlan.model_fields[setting].alias or setting


def texts_of(plan: MemoryPlan) -> dict[str, str]:
    """The value of every setting of `plan`, by its name; the generation is not a setting."""
    settings = [setting for setting in MemoryPlan.model_fields if setting != "generation"]
    return {name_of(setting): text_of(setting, getattr(plan, setting)) for setting in settings}


def text_of(setting: str, value: object) -> str:
    """`value` of `setting` (a field of the plan) as in the manifest, in at most 64 characters: Enabled, Level2, 512Mi.

    An absent value is `default`.
    """
    match value:
        case None:
            return "default"
        case bool():
            return "Enabled" if value else "Disabled"
        case int() if setting.endswith("_bytes"):
            return byte_quantity(value)
        case list():
            nodes = ", ".join(map(str, value)) or "none"
            return nodes if len(nodes) <= _LONGEST_TEXT else f"{len(value)} nodes"
        case _:
            return str(value)


def is_size(name: str) -> bool:
    """True if the value of the setting `name` is a number of bytes."""
    return name in _SIZES


_SIZES = frozenset(name_of(field) for field in MemoryPlan.model_fields if field.endswith("_bytes"))
