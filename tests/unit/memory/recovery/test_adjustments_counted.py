"""How changes of the plan count against the budget, and how progress gives them back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_api.plan_change import PlanChange
from rljob_memory.recovery import History, adjustments_left_standing, history_of, with_change
from tests.unit.memory.recovery.failures import FIRST_PLAN, change_of, diagnosis, failure, latitude, remedies_of


def changed_at(step: int, *, preventive: bool = False) -> PlanChange:
    evidence = failure(diagnosis("ActivationSpike"), step=step)
    [remedy], _ = remedies_of([evidence], FIRST_PLAN, latitude())
    return change_of(evidence, remedy, preventive=preventive)


@pytest.mark.parametrize(
    ("committed_step", "steps", "standing"),
    [
        (4, 100, 2),  # the step that failed is still not done
        (13, 100, 2),
        (14, 100, 1),  # ten steps, from the 5th
        (94, 100, 1),  # ninety steps give back one as well
        (6, 8, 1),  # half of the four that remained
        (5, 8, 2),
    ],
)
def test_progress_gives_one_adjustment_back(committed_step: int, steps: int, standing: int) -> None:
    history = History((changed_at(5),), adjustments=2, committed_step=committed_step)
    assert adjustments_left_standing(history, steps) == standing


def test_what_progress_gave_back_is_taken_off_with_the_next_change() -> None:
    history = with_change(History(), changed_at(5), steps=100)
    history = with_change(replace(history, committed_step=4), changed_at(5), steps=100)
    assert history.adjustments == 2
    history = with_change(replace(history, committed_step=20), changed_at(21), steps=100)
    assert history.adjustments == 2
    assert len(history.changes) == 3


def test_a_change_that_was_made_before_a_failure_counts_nothing() -> None:
    history = with_change(History(), changed_at(5), steps=100)
    history = with_change(replace(history, committed_step=14), changed_at(15, preventive=True), steps=100)
    assert history.adjustments == 1
    assert adjustments_left_standing(history, steps=100) == 0, "progress counts from the last failure"


def test_changes_that_nobody_counted_are_counted_as_if_one_by_one() -> None:
    changes = [changed_at(5), changed_at(5), changed_at(30), changed_at(31)]
    history = history_of(changes, committed_step=35, steps=100)
    assert history.adjustments == 3
    assert history.changes == tuple(changes)
    assert history.committed_step == 35
