"""The rungs that a failure leaves: which changes act on its class, and which would, if they were free to be made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from rljob_api.plan_change import RemedyLevel, Role
from rljob_api.roles import SupportedSetting
from rljob_memory.diagnosis import FailureClass
from rljob_memory.recovery.case import Case
from rljob_memory.recovery.families import FAMILIES
from rljob_memory.recovery.family import Change, Family
from rljob_memory.recovery.latitude import LEVELS
from rljob_memory.recovery.levels import needed_level, respawned_roles
from rljob_memory.recovery.pins import is_pinned, pinned_line
from rljob_memory.recovery.plan_text import text_of, texts_of


@dataclass(frozen=True, slots=True)
class Rung:
    """One change that can be made. `level`: None where it is beyond the caller."""

    family: Family
    change: Change
    level: RemedyLevel | None
    respawn: frozenset[Role]


@dataclass(frozen=True, slots=True)
class Ladder:
    """`rungs`: in the order of their price. `pinned`, `bounded`: what keeps other changes from being made, as lines
    that say what to write in the manifest."""

    rungs: tuple[Rung, ...]
    pinned: tuple[str, ...]
    bounded: tuple[str, ...]

    @property
    def reachable(self) -> list[Rung]:
        return [rung for rung in self.rungs if rung.level is not None]


def families_for(failure_class: FailureClass) -> list[Family]:
    """The families that act on a class: the cheapest level first, and within a level in the order of their price."""
    acting = [family for family in FAMILIES if failure_class in family.acts_on]
    return sorted(acting, key=lambda family: LEVELS.index(family.level))


def ladder_of(case: Case) -> Ladder:
    """All that acts on the case's class, and has not been in force before."""
    rungs: list[Rung] = []
    pinned: list[str] = []
    bounded: list[str] = []
    for family in families_for(case.failure_class):
        change = family.next_change(case)
        if change is None:
            if line := family.bound(case):
                bounded.append(line)
        elif is_pinned(case.latitude.settings, family.setting):
            pinned.append(pinned_line(case.latitude.settings, family.setting, change.value))
        elif not _is_supported(case, family):
            if family.name in get_args(SupportedSetting):
                bounded.append(
                    f"{family.name} would act: make the trainer read it, and add it to trainer.supportedSettings"
                )
        elif not _repeats(case, family, change):
            rungs.append(_rung(case, family, change))
    return Ladder(tuple(rungs), tuple(pinned), tuple(bounded))


def best(rungs: Sequence[Rung], need_bytes: int | None) -> Rung:
    """The cheapest level first; within it, what covers most of the need; of equals, the first.

    Without a known need there is nothing to cover, and the price decides.
    """

    def preference(rung: Rung) -> tuple[int, int]:
        level = LEVELS.index(rung.level) if rung.level else len(LEVELS)
        covered = min(rung.change.expected_bytes or 0, need_bytes or 0)
        return level, -covered

    return min(rungs, key=preference)


def _rung(case: Case, family: Family, change: Change) -> Rung:
    level = case.latitude.level_in_force(needed_level(case, family))
    return Rung(family, change, level, respawned_roles(case, family, level) if level else frozenset())


def _is_supported(case: Case, family: Family) -> bool:
    """What the pods have, the cluster gives; the rest the trainer has to understand."""
    supported = case.latitude.supported_settings
    return family.owner is None or supported is None or family.name in supported


def _repeats(case: Case, family: Family, change: Change) -> bool:
    texts = {**texts_of(case.plan), family.name: text_of(change.value)}
    return family.of_the_plan and case.history.was_in_force(texts, case.plan)
