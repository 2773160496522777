"""docs/recovery.md agrees with the recovery engine."""

from __future__ import annotations

from pathlib import Path

from rljob_api.conditions import ConditionReason
from rljob_api.plan_change import RemedyLevel
from rljob_memory.diagnosis import FailureClass
from rljob_memory.recovery import GiveUpReason
from rljob_memory.recovery.families import FAMILIES
from rljob_memory.recovery.family import Family
from rljob_memory.recovery.ladder import families_for

PAGE = (Path(__file__).parents[4] / "docs" / "recovery.md").read_text(encoding="utf-8")
IN_FORCE_BY: dict[RemedyLevel, str] = {
    "Live": "the running processes",
    "RestartInPlace": "new containers in the same pods",
    "ReplacePods": "new pods",
}


def rows_under(heading: str) -> list[list[str]]:
    """The cells of the table whose header begins with `heading`."""
    lines = PAGE.partition(f"| {heading} |")[2].splitlines()[2:]
    rows = lines[: next(number for number, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def in_force_by(family: Family) -> str:
    if family.level != "RespawnRole":
        return IN_FORCE_BY[family.level]
    return "new engines" if family.owner == "rollout" else "new policy processes"


def test_the_page_lists_every_class_with_its_remedies() -> None:
    expected = [
        [f"`{cause}`", ", ".join(f"`{family.name}`" for family in families_for(cause))] for cause in FailureClass
    ]
    assert rows_under("class") == expected


def test_the_page_lists_every_setting_with_its_level() -> None:
    documented = {setting: by for setting, _, by in rows_under("setting")}
    assert documented == {f"`{family.name}`": in_force_by(family) for family in FAMILIES}


def test_the_page_lists_every_reason_to_give_up() -> None:
    documented = {reason.strip("`") for reason, _ in rows_under("reason")}
    of_the_engine = {
        GiveUpReason.ADJUSTMENTS_EXHAUSTED,
        GiveUpReason.PINNED_SETTING_CONFLICT,
        GiveUpReason.NO_PROGRESS,
        GiveUpReason.RESTARTS_EXHAUSTED,
    }
    assert documented == of_the_engine
    not_of_conditions = {GiveUpReason.NOTHING_LEFT, GiveUpReason.LEFT_TO_SUPERVISOR}
    assert set(GiveUpReason) - not_of_conditions <= set(ConditionReason)
    assert documented <= set(ConditionReason)
