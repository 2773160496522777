"""Restarts in place: the wait of the controller for the operator's decision, and that of the workers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_api.step_report import ExitDecision, StepReportStatus
from rljob_trainer.pods import restart_in_place
from rljob_trainer.pods.attempt_start import RequiredAttempt
from rljob_trainer.pods.head_watch import HeadWatch, Observed
from rljob_trainer.pods.restart_in_place import Next, next_for, wait_for_restart
from rljob_trainer.step_report.api_server import NoAnswer

NEXT = RequiredAttempt(number=4, plan_generation=2)


def decided(attempt: int = 3, **decision: Any) -> StepReportStatus:
    return StepReportStatus(attempt=3, decision=ExitDecision(attempt=attempt, **decision))


IN_PLACE = decided(next_attempt=4, plan_generation=2)


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (None, "Wait"),
        (StepReportStatus(attempt=3), "Wait"),
        (decided(attempt=2, next_attempt=3, plan_generation=1), "Wait"),
        (IN_PLACE, NEXT),
        (decided(), "End"),
    ],
    ids=["no report", "no decision yet", "about an earlier attempt", "the same pods", "the job has failed"],
)
def test_the_decision_is_to_restart_exit_or_wait(report: StepReportStatus | None, expected: Next) -> None:
    assert next_for(report, attempt=3) == expected


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only pauses advance."""
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(restart_in_place, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return now


def test_a_short_outage_of_the_api_server_is_tolerated(no_pause: list[float]) -> None:
    answers: Iterator[NoAnswer | StepReportStatus] = iter([NoAnswer("away"), StepReportStatus(attempt=3), IN_PLACE])

    def read() -> StepReportStatus:
        answer = next(answers)
        if isinstance(answer, NoAnswer):
            raise answer
        return answer

    assert wait_for_restart(read, attempt=3) == NEXT
    assert no_pause == [102.0]


def test_the_wait_for_an_absent_operator_ends_after_a_minute(no_pause: list[float]) -> None:
    assert wait_for_restart(lambda: StepReportStatus(attempt=3), attempt=3) is None
    assert no_pause == [160.0]


def test_a_worker_that_is_to_be_restarted_stays_until_the_old_head_is_gone() -> None:
    watch = HeadWatch("digits-controller.train.svc:6379", now=100.0)
    assert watch.check(Observed(head=True, raylet=True, controller_ended=True, to_restart=True), 101.0) is None
    ending = watch.check(Observed(head=False, raylet=False, controller_ended=True, to_restart=True), 102.0)
    assert ending is not None
    assert ending.exit_code == ExitCode.RESTART_IN_PLACE
