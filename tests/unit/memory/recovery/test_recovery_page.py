"""docs/recovery.md agrees with the recovery engine."""

from __future__ import annotations

import re
from pathlib import Path

from rljob_api.conditions import ConditionReason
from rljob_api.plan_change import RemedyLevel
from rljob_memory.diagnosis import FailureClass
from rljob_memory.recovery import GiveUp, GiveUpReason, RecoveryState
from rljob_memory.recovery.families import FAMILIES
from rljob_memory.recovery.family import Family
from rljob_memory.recovery.ladder import families_for
from rljob_memory.recovery.respond import MOST_CHANGES_WITHOUT_PROGRESS
from rljob_memory.recovery.state import STEPS_THAT_FORGIVE
from tests.unit.memory.recovery.failures import FIRST_PLAN, ON_ONE_MACHINE, answer, answers_to, constraints, failure

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


def test_the_page_has_the_numbers_of_the_code() -> None:
    recovery = constraints().recovery
    assert f"`recovery.maxAdjustments` ({recovery.max_adjustments})" in PAGE
    assert f"`recovery.maxRestarts` ({recovery.max_restarts})" in PAGE
    assert STEPS_THAT_FORGIVE == MOST_CHANGES_WITHOUT_PROGRESS == 10, "the page says ten of both"


def test_the_explanation_on_the_page_is_real() -> None:
    """Made of two failures of one job, the second after the budget was used up."""
    shown = re.sub(r"\s+", " ", PAGE.partition("```text\n")[2].partition("```")[0]).strip()
    assert shown == an_account()


def an_account() -> str:
    message = (
        "CUDA out of memory. Tried to allocate 5.20 GiB. GPU 0 has a total capacity of 139.81 GiB of which 1.10 GiB is "
        "free. Including non-PyTorch memory, this process has 137.20 GiB memory in use. Of the allocated memory 134.90 "
        "GiB is allocated by PyTorch, and 1.30 GiB is reserved by PyTorch but unallocated."
    )
    evidence = failure(message=message, step=41)
    given = constraints(ON_ONE_MACHINE, memory={"activationCheckpointing": "Disabled"}, recovery={"maxAdjustments": 1})
    [remedy], _ = answers_to([evidence], FIRST_PLAN, given)
    change = remedy.change.model_copy(update={"seconds_to_recover": 2.0})
    freed = change.remedy.model_copy(update={"observed_bytes": round(9.1 * (1 << 30))})
    change = change.model_copy(update={"remedy": freed})
    state = RecoveryState(None, 1_000, (change,), adjustments=1, committed_step=43)
    end = answer(failure(message=message, step=44), remedy.plan, given, state)
    assert isinstance(end, GiveUp)
    return end.explanation
