"""A memory plan that was computed for another machine or another number of processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import PlanChange
from rljob_memory.budget import Setup
from rljob_memory.plan_settings import name_of, text_of
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


def rederived(plan: MemoryPlan, changes: Sequence[PlanChange], fresh: MemoryPlan) -> MemoryPlan:
    """`fresh`, which was computed for the present machine, within the limits that earlier failures have set.

    Sizes in `changes` are at most those of `plan`; switches in `changes` and settings of pods are those of `plan`. The
    generation is the next one, unless the result has the same values as `plan`.
    """
    changed = {change.remedy.setting for change in changes}
    kept: dict[str, Any] = {setting: getattr(plan, setting) for setting in SET_ON_PODS}
    for setting in MemoryPlan.model_fields:
        if name_of(setting) in changed and setting not in kept:
            kept[setting] = _capped(getattr(fresh, setting), getattr(plan, setting))
    derived = fresh.model_copy(update=kept | {"generation": plan.generation})
    return plan if derived == plan else derived.model_copy(update={"generation": plan.generation + 1})


def _capped(fresh: Any, limit: Any) -> Any:
    if isinstance(limit, int) and not isinstance(limit, bool):
        return min(fresh, limit)
    return limit


def _differs(name: str, before: Any, now: Any) -> bool:
    if not name.endswith("memory_bytes"):
        return bool(before != now)
    if name == "host_memory_bytes":
        return bool(now < before * (1 - _SAME))
    return bool(abs(now - before) > before * _SAME)
