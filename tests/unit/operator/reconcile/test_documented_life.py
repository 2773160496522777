"""docs/job-life.md lists every reason, and no other."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import get_args

import pytest

from rljob_api.conditions import AttemptReason, ConditionReason, ConditionType
from rljob_api.step_report import TrainingWarningReason
from rljob_memory.recovery import GiveUpReason
from rljob_operator.reconcile.status_draft import EventReason

PAGE = (Path(__file__).parents[4] / "docs" / "job-life.md").read_text(encoding="utf-8")


def documented(section: str) -> set[str]:
    """First column of the table under a heading."""
    text = re.split(r"^#+ ", PAGE.split(f"# {section}\n")[1], flags=re.MULTILINE)[0]
    return set(re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE))


def test_every_reason_of_a_condition_is_documented() -> None:
    of_the_engine = set(GiveUpReason) - {GiveUpReason.NOTHING_LEFT, GiveUpReason.LEFT_TO_SUPERVISOR}
    of_the_trainer = set(get_args(TrainingWarningReason))
    reasons = {reason.value for reason in [*ConditionReason, *of_the_engine]} | of_the_trainer
    assert documented("Conditions") == reasons


def test_every_condition_is_documented() -> None:
    assert set(re.findall(r"^\| \*\*(\w+)\*\* \|", PAGE, flags=re.MULTILINE)) == {
        type_.value for type_ in ConditionType
    }


@pytest.mark.parametrize(("section", "reasons"), [("Attempts", AttemptReason), ("Events", EventReason)])
def test_every_reason_of_attempts_and_events_is_documented(section: str, reasons: type[StrEnum]) -> None:
    assert documented(section) == {reason.value for reason in reasons}
