"""The ladder of a failure: the changes that act on its class, the cheapest first, and the obstacles to the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from rljob_api.plan_change import RemedyLevel, Role
from rljob_api.roles import SupportedSetting
from rljob_memory.diagnosis import FailureClass
from rljob_memory.plan_settings import is_pinned, pinned_line, texts_of
from rljob_memory.recovery.constraints import LEVELS
from rljob_memory.recovery.failure import Case
from rljob_memory.recovery.families import FAMILIES
from rljob_memory.recovery.families.processes_and_gpus import POLICY_GPUS
from rljob_memory.recovery.family import Change, Family

_POLICY_AND_ROLLOUT: frozenset[Role] = frozenset({"policy", "rollout"})


@dataclass(frozen=True, slots=True)
class Rung:
    """One change that can be made."""

    family: Family
    change: Change
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


def families_for(failure_class: FailureClass) -> list[Family]:
    """The families that act on a class: the cheapest level first, and within a level in the order of their price."""
    acting = [family for family in FAMILIES if failure_class in family.acts_on]
    return sorted(acting, key=lambda family: LEVELS.index(family.level))


def ladder_of(case: Case) -> Ladder:
    """The changes that act on the case's class and lead to a plan that was not current before."""
    rungs: list[Rung] = []
    pinned: list[str] = []
    bounded: list[str] = []
    for family in families_for(case.failure_class):
        change = family.next_change(case)
        if change is None:
            if line := family.bound(case):
                bounded.append(line)
        elif is_pinned(case.constraints.settings, family.setting):
            pinned.append(pinned_line(case.constraints.settings, family.setting, change.value))
        elif not _is_supported(case, family):
            if family.name in get_args(SupportedSetting):
                bounded.append(
                    f"{family.name} would help: make the trainer read it, and add it to trainer.supportedSettings"
                )
        elif not _repeats(case, family, change):
            level = case.constraints.available_level(needed_level(case, family))
            rungs.append(Rung(family, change, level, _renewed_roles(case, family, level)))
    return Ladder(tuple(rungs), tuple(pinned), tuple(bounded))


def last_resort(case: Case) -> Rung | None:
    """More GPUs for the policy, which is tried once no setting is left or may be changed; None if it cannot grow."""
    change, growth = POLICY_GPUS.next_change(case), case.constraints.growth
    if change is None or growth is None or growth.level not in case.constraints.levels:
        return None
    if not _is_supported(case, POLICY_GPUS):
        return None
    return Rung(POLICY_GPUS, change, growth.level, _POLICY_AND_ROLLOUT)


def best(rungs: Sequence[Rung], need_bytes: int | None) -> Rung:
    """The change on the cheapest level; on one level, the change that covers most of the need; among equals, the first.

    Without a known need, the price decides.
    """

    def preference(rung: Rung) -> tuple[int, int]:
        level = LEVELS.index(rung.level) if rung.level else len(LEVELS)
        covered = min(rung.change.expected_bytes or 0, need_bytes or 0)
        return level, -covered

    return min(rungs, key=preference)


def needed_level(case: Case, family: Family) -> RemedyLevel:
    """The lowest level at which `family`'s change takes effect and no role is dead."""
    return max(family.level, _level_that_revives(case.dead), key=LEVELS.index)


def _level_that_revives(dead: frozenset[Role]) -> RemedyLevel:
    if not dead:
        return "Live"
    return "RestartInPlace" if "controller" in dead else "RespawnRole"


def _renewed_roles(case: Case, family: Family, level: RemedyLevel | None) -> frozenset[Role]:
    if level is None or level == "Live":
        return frozenset()
    if level != "RespawnRole":
        return _POLICY_AND_ROLLOUT
    renewed = set(case.dead)
    if family.owner and family.level != "Live":
        renewed.add(family.owner)
    return frozenset(renewed or {family.owner or case.role})


def _is_supported(case: Case, family: Family) -> bool:
    """The cluster provides the settings of the pods; another trainer has to read all others."""
    supported = case.constraints.supported_settings
    return family.owner is None or supported is None or family.name in supported


def _repeats(case: Case, family: Family, change: Change) -> bool:
    texts = {**texts_of(case.plan), family.name: family.text_of(change.value)}
    return family.of_the_plan and case.state.was_current(texts)
