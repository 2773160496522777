"""Settings of the memory plan: names and values as the manifest writes them, and those that `spec.memory` pins."""

from __future__ import annotations

from typing import Any

from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemoryPlan, MemorySettings
from rljob_api.plan_change import Role
from rljob_api.quantity import byte_quantity

# Names and values of the plan's settings as the manifest writes them.

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
        case float():
            return {0.0: "Disabled", 1.0: "Enabled"}.get(value, f"{value:.0%}")
        case int() if setting.endswith("_bytes"):
            return byte_quantity(value)
        case list():
            nodes = ", ".join(map(str, value)) or "none"
            return nodes if len(nodes) <= _LONGEST_TEXT else f"{len(value)} nodes"
        case _:
            return str(value)


def host_memory_setting(role: Role) -> str:
    """The setting for the memory limit of a role's pods."""
    return "controller_host_memory_bytes" if role == "controller" else "host_memory_bytes"


def planned_host_memory(plan: MemoryPlan, role: Role) -> int | None:
    """The memory limit of a role's pods, bytes; None if the plan leaves it as it is."""
    limit: int | None = getattr(plan, host_memory_setting(role))
    return limit


def is_size(name: str) -> bool:
    """True if the value of the setting `name` is a number of bytes."""
    return name in _SIZES


_SIZES = frozenset(name_of(field) for field in MemoryPlan.model_fields if field.endswith("_bytes"))


# Pinned settings: the fields of `spec.memory` with a value other than `Auto`, and their values in the plan.

_PINNING_FIELDS = {field.alias: name for name, field in MemorySettings.model_fields.items()}


def is_pinned(settings: MemorySettings, setting: str) -> bool:
    """True if `setting`, a field of the plan, has a value in `spec.memory`."""
    field = pinning_field(setting)
    return field is not None and getattr(settings, field) != "Auto"


def pinned_values(settings: MemorySettings, *, shares_gpu: bool | None) -> dict[str, Any]:
    """Values that `spec.memory` pins, by the plan's field.

    `shares_gpu`: policy and engine take turns on a GPU. If not, an engine never sleeps, even if a level is pinned.
    None: not known yet, so the sleep level is left out.
    """
    fields = {setting: field for setting in MemoryPlan.model_fields if (field := pinning_field(setting))}
    written = {setting: getattr(settings, field) for setting, field in fields.items()}
    pinned = {setting: _as_in_plan(setting, value) for setting, value in written.items() if value != "Auto"}
    if "rollout_sleep" in pinned and not shares_gpu:
        del pinned["rollout_sleep"]
        return pinned if shares_gpu is None else pinned | {"rollout_sleep": "Disabled"}
    return pinned


def values_in(spec: RLJobSpec, *, shares_gpu: bool | None) -> dict[str, Any]:
    """Settings of the plan with a value in the manifest: `pinned_values`, and the size of the engines."""
    size = spec.rollout.tensor_parallel_size
    engines = {} if size == "Auto" else {"tensor_parallel_size": size}
    return pinned_values(spec.memory, shares_gpu=shares_gpu) | engines


def with_pins(plan: MemoryPlan, spec: RLJobSpec, *, shares_gpu: bool | None) -> MemoryPlan:
    """`plan` itself, or a plan of the next generation if `spec` pins a setting to another value."""
    pinned = values_in(spec, shares_gpu=shares_gpu)
    changed = {setting: value for setting, value in pinned.items() if value != getattr(plan, setting)}
    return plan.model_copy(update={"generation": plan.generation + 1, **changed}) if changed else plan


def pinned_line(settings: MemorySettings, setting: str, value: object) -> str:
    """`memory.kvCache is pinned to 64Gi: write 48Gi, or Auto`. Raises ValueError for a setting without such a field."""
    field = pinning_field(setting)
    if field is None:
        raise ValueError(f"expected a setting that spec.memory can pin, found {setting!r}")
    pinned = text_of(setting, getattr(settings, field))
    return f"memory.{name_of(setting)} is pinned to {pinned}: write {text_of(setting, value)}, or Auto"


def pinning_field(setting: str) -> str | None:
    """The field of `spec.memory` that pins `setting`; None if no field does."""
    return _PINNING_FIELDS.get(MemoryPlan.model_fields[setting].alias) if setting in MemoryPlan.model_fields else None


def _as_in_plan(setting: str, value: Any) -> Any:
    kind = MemoryPlan.model_fields[setting].annotation
    if kind is float and value.endswith("%"):
        return int(value.removesuffix("%")) / 100
    return kind(value == "Enabled") if kind in (bool, float) else value
