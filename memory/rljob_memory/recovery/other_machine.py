"""A memory plan that was computed for another machine or another number of processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import Any

from rljob_api.memory_plan import MemoryPlan
from rljob_api.memory_profile import ProfileChange
from rljob_api.plan_change import PlanChange, RemedyStatus
from rljob_api.quantity import quantity_value
from rljob_memory.budget import Setup
from rljob_memory.plan_settings import name_of, text_of
from rljob_memory.recovery.remedies import POLICY_GPUS, REMEDIES
from rljob_memory.recovery.state import SET_ON_PODS

PlanFacts = dict[str, Any]
"""Machine, model and work that a plan is computed from: JSON values by name."""

_SAME = 0.05
"""Machines of one type differ by less than this part of their memory."""

_OF_NO_SIZE = frozenset({"shared_memory_bytes", "kept_checkpoints", "caches_model", "caches_compiled_code"})
"""Facts that change no size of a plan."""


def plan_facts(setup: Setup) -> PlanFacts:
    """The facts that change a size of the plan."""
    facts = asdict(setup.hardware) | asdict(setup.model) | asdict(setup.work)
    return {name: value for name, value in facts.items() if name not in _OF_NO_SIZE}


def differing_facts(then: PlanFacts, now: PlanFacts) -> list[str]:
    """Readable list of the facts that differ: `policy_ranks 8, now 4`. Those that were not recorded do not count.

    More host memory than before does not count: it may have been added after a failure.
    """
    return [
        f"{name} {text_of(name, before)}, now {text_of(name, now[name])}"
        for name, before in then.items()
        if name in now and _differs(name, before, now[name])
    ]


def rederived(plan: MemoryPlan, changes: Sequence[PlanChange | ProfileChange], fresh: MemoryPlan) -> MemoryPlan:
    """`fresh`, which was computed for the present machine, within the limits that earlier failures have set.

    Settings in `changes` are limited by those of `plan`; settings of pods are those of `plan`. The generation is the
    next one, unless the result has the same values as `plan`.
    """
    of_pods = {setting: getattr(plan, setting) for setting in SET_ON_PODS}
    limited = within_limits(fresh, plan, changes)
    derived = limited.model_copy(update=of_pods | {"generation": plan.generation})
    return plan if derived == plan else derived.model_copy(update={"generation": plan.generation + 1})


def within_limits(fresh: MemoryPlan, held: MemoryPlan, changes: Sequence[PlanChange | ProfileChange]) -> MemoryPlan:
    """`fresh` with the settings in `changes`, which led to `held`, limited: a size that was lowered is at most that of
    `held`, one that was raised at least; switches, and settings that a change brought, are those of `held`."""
    remedies = remedies_by_setting(changes)
    fields = [field for field in MemoryPlan.model_fields if name_of(field) in remedies]
    limits = {
        field: _limited(getattr(fresh, field), getattr(held, field), remedies[name_of(field)]) for field in fields
    }
    brought = {name for each in (*REMEDIES, POLICY_GPUS) if each.name in remedies for name in each.brings}
    return fresh.model_copy(update=limits | {name: getattr(held, name) for name in brought})


def remedies_by_setting(changes: Sequence[PlanChange | ProfileChange]) -> dict[str, RemedyStatus]:
    """The whole change of each setting, from its first value to its last, by its name. `changes`: oldest first."""
    remedies: dict[str, RemedyStatus] = {}
    for change in changes:
        earlier = remedies.get(change.remedy.setting, change.remedy)
        remedies[change.remedy.setting] = change.remedy.model_copy(update={"before": earlier.before})
    return remedies


def _limited(fresh: Any, held: Any, remedy: RemedyStatus) -> Any:
    if isinstance(held, bool) or not isinstance(held, int | float) or fresh is None:
        return held
    return max(fresh, held) if _was_raised(remedy) else min(fresh, held)


def _was_raised(remedy: RemedyStatus) -> bool:
    try:
        return _number(remedy.after) > _number(remedy.before)
    except ValueError:  # it had no value before
        return remedy.before == text_of(remedy.setting, None)


def _number(text: str) -> Fraction:
    """Value of a size or a share that `text_of` wrote. Raises ValueError for any other text."""
    if text in ("Disabled", "Enabled"):
        return Fraction(text == "Enabled")
    return quantity_value(text[:-1]) / 100 if text.endswith("%") else quantity_value(text)


def _differs(name: str, before: Any, now: Any) -> bool:
    if not name.endswith("memory_bytes"):
        return bool(before != now)
    if name == "host_memory_bytes":
        return bool(now < before * (1 - _SAME))
    return bool(abs(now - before) > before * _SAME)
