"""Pinned settings: the fields of `spec.memory` with a value other than `Auto`, and their values in the plan."""

from __future__ import annotations

from typing import Any

from rljob_api.memory_plan import MemoryPlan
from rljob_api.memory_settings import MemorySettings
from rljob_memory.estimate import MIB

_NAMED_OTHERWISE = {
    "rollout_sleep_level": "rollout_sleep",
    "kv_cache_bytes": "kv_cache",
    "sync_bucket_bytes": "sync_bucket_size",
}
_SLEEP_LEVELS = ("Disabled", "Level1", "Level2")


def is_pinned(settings: MemorySettings, setting: str) -> bool:
    """True if `setting`, a field of the plan, has a value in `spec.memory`."""
    field = pinning_field(setting)
    return field is not None and getattr(settings, field) != "Auto"


def pinned_values(settings: MemorySettings, *, shares_gpu: bool | None) -> dict[str, Any]:
    """Values that `spec.memory` pins, by the plan's field.

    `shares_gpu`: policy and engine take turns on a GPU. If they do not, an engine never sleeps, whatever is pinned.
    None: not known yet, so the sleep level is left out.
    """
    fields = {setting: field for setting in MemoryPlan.model_fields if (field := pinning_field(setting))}
    written = {setting: getattr(settings, field) for setting, field in fields.items()}
    pinned = {setting: _as_in_plan(setting, value) for setting, value in written.items() if value != "Auto"}
    if "rollout_sleep_level" in pinned and not shares_gpu:
        del pinned["rollout_sleep_level"]
        return pinned if shares_gpu is None else pinned | {"rollout_sleep_level": 0}
    return pinned


def with_pins(plan: MemoryPlan, settings: MemorySettings, *, shares_gpu: bool | None) -> MemoryPlan:
    """`plan` itself, or a plan of the next generation if `settings` pin a setting to another value."""
    pinned = pinned_values(settings, shares_gpu=shares_gpu)
    changed = {setting: value for setting, value in pinned.items() if value != getattr(plan, setting)}
    return plan.model_copy(update={"generation": plan.generation + 1, **changed}) if changed else plan


def pinned_line(settings: MemorySettings, setting: str, value: object) -> str:
    """`memory.kvCache is pinned to 64Gi: write 48Gi, or Auto`."""
    field = pinning_field(setting)
    if field is None:
        raise ValueError(f"expected a setting that spec.memory can pin, found {setting!r}")
    alias = MemorySettings.model_fields[field].alias
    pinned = as_in_manifest(setting, getattr(settings, field))
    return f"memory.{alias} is pinned to {pinned}: write {as_in_manifest(setting, value)}, or Auto"


def as_in_manifest(setting: str, value: object) -> str:
    """`value` of the plan's `setting` as written in the manifest: Enabled, Level2, 512Mi, 4096."""
    match value:
        case bool():
            return "Enabled" if value else "Disabled"
        case int() if setting == "rollout_sleep_level":
            return _SLEEP_LEVELS[value]
        case int() if setting.endswith("_bytes"):
            return f"{value // MIB}Mi" if value % MIB == 0 else str(value)
        case _:
            return str(value)


def pinning_field(setting: str) -> str | None:
    """The field of `spec.memory` that pins `setting`; None if no field does."""
    field = _NAMED_OTHERWISE.get(setting, setting)
    return field if field in MemorySettings.model_fields else None


def _as_in_plan(setting: str, value: Any) -> Any:
    if setting == "rollout_sleep_level":
        return _SLEEP_LEVELS.index(value)
    return value == "Enabled" if value in ("Enabled", "Disabled") else value
