"""Exit of a worker, and restarts in place: the wait of the controller and of the workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_api.step_report import ExitDecision, StepReportStatus
from rljob_trainer.pods import controller_pod
from rljob_trainer.pods.attempt_start import RequiredAttempt
from rljob_trainer.pods.controller_pod import Next, next_for, wait_for_restart
from rljob_trainer.pods.worker_pod import HEAD_GONE_SECONDS, HeadWatch, Observed
from rljob_trainer.step_report.api_server import NoAnswer

GONE = 100 + HEAD_GONE_SECONDS
ANSWERS, SILENT = Observed(True, True, False), Observed(False, True, False)
Ending = tuple[ExitCode, str] | None


@pytest.mark.parametrize(
    ("observed", "ending"),
    [
        ([(ANSWERS, now) for now in range(100, 10_000, 100)], None),
        ([(SILENT, GONE - 1), (ANSWERS, GONE), (SILENT, GONE + HEAD_GONE_SECONDS - 1)], None),  # a short silence
        ([(SILENT, GONE)], (ExitCode.WORKER_LOST, "digits-controller:6379 has not answered for 15 s")),
        ([(Observed(False, False, False), GONE - 1)], None),  # a raylet that ends after its head is not the failure
        ([(Observed(True, False, False), 101)], (ExitCode.WORKER_LOST, "")),
        ([(Observed(True, True, True), 101), (Observed(True, False, True), 102)], None),  # an announced exit
        ([(Observed(True, False, True), 102), (Observed(False, False, True), 103)], (ExitCode.COMPLETE, "")),
        ([(Observed(True, True, True, to_restart=True), 101)], None),
        ([(Observed(False, False, True, to_restart=True), 102)], (ExitCode.RESTART_IN_PLACE, "")),
        (
            [(Observed(True, False, False, oom_kills=2), 101)],
            (ExitCode.HOST_OUT_OF_MEMORY, "the kernel killed 2 of this container's processes"),
        ),
    ],
)
def test_a_worker_exits_with_its_head_or_its_raylet(observed: list[tuple[Observed, float]], ending: Ending) -> None:
    watch = HeadWatch("digits-controller:6379", now=100.0)
    found = [watch.check(seen, now) for seen, now in observed]
    assert not any(found[:-1])
    if ending is None:
        assert found[-1] is None
    else:
        assert found[-1] is not None
        assert found[-1].exit_code == ending[0]
        assert ending[1] in found[-1].message


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
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only pauses advance."""
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(controller_pod, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return now


@pytest.mark.parametrize(
    ("answers", "expected", "seconds"),
    [
        ([NoAnswer("away"), StepReportStatus(attempt=3), IN_PLACE], NEXT, 2.0),
        ([StepReportStatus(attempt=3)] * 61, None, 60.0),
    ],
    ids=["a short outage of the API server", "an absent operator"],
)
def test_the_wait_for_a_decision_lasts_a_minute_at_most(
    answers: list[Any], expected: RequiredAttempt | None, seconds: float, clock: list[float]
) -> None:
    def read() -> StepReportStatus:
        answer: NoAnswer | StepReportStatus = answers.pop(0)
        if isinstance(answer, NoAnswer):
            raise answer
        return answer

    assert wait_for_restart(read, attempt=3) == expected
    assert clock == [100.0 + seconds]
