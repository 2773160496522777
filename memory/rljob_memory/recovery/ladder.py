"""The ladder of a failure: the changes that act on its class, the cheapest first, and the obstacles to the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from rljob_api.plan_change import RemedyLevel, Role
from rljob_api.roles import SupportedSetting
from rljob_memory.plan_settings import is_pinned, pinned_line, texts_of
from rljob_memory.recovery.constraints import LEVELS
from rljob_memory.recovery.effects import expected_bytes
from rljob_memory.recovery.failure import Case
from rljob_memory.recovery.remedies import POLICY_GPUS, Remedy, remedies_for

_POLICY_AND_ROLLOUT: frozenset[Role] = frozenset({"policy", "rollout"})


@dataclass(frozen=True, slots=True)
class Rung:
    """One change that can be made."""

    remedy: Remedy
    value: object
    """The next value of its setting."""
    expected_bytes: int | None
    """Memory that it frees, or adds to a size that was too small; None if that is unknown."""
    level: RemedyLevel | None
    """Level at which the caller brings it into force; None if that is beyond the caller."""
    renew: frozenset[Role]
    """Roles that need new processes for it."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """Everything that acts on one class of failure."""

    rungs: tuple[Rung, ...]
    """In the order of their price."""
    pinned: tuple[str, ...]
    """A line for each pinned setting that prevents a change, with the value to write instead."""
    bounded: tuple[str, ...]
    """The same for bounds other than pinned settings."""

    @property
    def reachable(self) -> list[Rung]:
        return [rung for rung in self.rungs if rung.level is not None]


def ladder_of(case: Case) -> Ladder:
    """The changes that act on the case's class and lead to a plan that was not current before."""
    rungs: list[Rung] = []
    pinned: list[str] = []
    bounded: list[str] = []
    for remedy in remedies_for(case.failure_class):
        rung = rung_of(case, remedy, case.constraints.available_level(needed_level(case, remedy)))
        if rung is None:
            if line := remedy.bound(case):
                bounded.append(line)
        elif is_pinned(case.constraints.settings, remedy.setting):
            pinned.append(pinned_line(case.constraints.settings, remedy.setting, rung.value))
        elif not _is_supported(case, remedy):
            if remedy.name in get_args(SupportedSetting):
                bounded.append(
                    f"{remedy.name} would help: make the trainer read it, and add it to trainer.supportedSettings"
                )
        elif not _repeats(case, rung):
            rungs.append(rung)
    return Ladder(tuple(rungs), tuple(pinned), tuple(bounded))


def rung_of(case: Case, remedy: Remedy, level: RemedyLevel | None) -> Rung | None:
    """The change that `remedy` makes; None if it can do nothing about the failure. By the budget, it has to free
    memory of a GPU, and to have room for what it moves."""
    value = remedy.next_value(case)
    if value is None or value == remedy.value_before(case):
        return None
    expected = expected_bytes(case, remedy, value)
    frees_nothing = expected is not None and expected <= 0
    has_room = not remedy.of_the_plan or case.has_room_for(remedy.setting, value, remedy.phase)
    # On a CPU, the budget of host memory is an upper bound. The last resort acts on no cause in particular.
    if (frees_nothing and case.on_gpu and remedy.causes) or not has_room:
        return None
    expected = None if frees_nothing else expected
    return Rung(remedy, value, expected, level, _renewed_roles(case, remedy, level))


def last_resort(case: Case) -> Rung | None:
    """More GPUs for the policy, which is tried once no setting is left or may be changed; None if it cannot grow."""
    growth = case.constraints.growth
    if growth is None or growth.level not in case.constraints.levels or not _is_supported(case, POLICY_GPUS):
        return None
    return rung_of(case, POLICY_GPUS, growth.level)


def best(rungs: Sequence[Rung], need_bytes: int | None) -> Rung:
    """The change on the cheapest level; on one level, the change that covers most of the need; among equals, the first.

    Without a known need, the price decides.
    """

    def preference(rung: Rung) -> tuple[int, int]:
        level = LEVELS.index(rung.level) if rung.level else len(LEVELS)
        covered = min(rung.expected_bytes or 0, need_bytes or 0)
        return level, -covered

    return min(rungs, key=preference)


def needed_level(case: Case, remedy: Remedy) -> RemedyLevel:
    """The lowest level at which `remedy` takes effect and no role is dead."""
    return max(remedy.level, _level_that_revives(case.dead), key=LEVELS.index)


def _level_that_revives(dead: frozenset[Role]) -> RemedyLevel:
    if not dead:
        return "Live"
    return "RestartInPlace" if "controller" in dead else "RespawnRole"


def _renewed_roles(case: Case, remedy: Remedy, level: RemedyLevel | None) -> frozenset[Role]:
    if level is None or level == "Live":
        return frozenset()
    if level != "RespawnRole":
        return _POLICY_AND_ROLLOUT
    renewed = set(case.dead)
    if remedy.owner and remedy.level != "Live":
        renewed.add(remedy.owner)
    return frozenset(renewed or {remedy.owner or case.role})


def _is_supported(case: Case, remedy: Remedy) -> bool:
    """The cluster provides the settings of the pods; another trainer has to read all others."""
    supported = case.constraints.supported_settings
    return remedy.owner is None or supported is None or remedy.name in supported


def _repeats(case: Case, rung: Rung) -> bool:
    texts = {**texts_of(case.plan), rung.remedy.name: rung.remedy.text_of(rung.value)}
    return rung.remedy.of_the_plan and case.state.was_current(texts)
