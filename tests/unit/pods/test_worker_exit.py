"""Exit of a worker, and restarts in place: the wait of the controller and of the workers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_api.step_report import ExitDecision, StepReportStatus
from rljob_trainer.pods import controller_pod, worker_pod
from rljob_trainer.pods.attempt_start import RequiredAttempt
from rljob_trainer.pods.controller_pod import wait_for_restart
from rljob_trainer.pods.environment import WorkerEnvironment
from rljob_trainer.pods.worker_pod import HEAD_GONE_SECONDS, Observed, exit_of_worker
from rljob_trainer.step_report.api_server import NoAnswer
from tests.unit.pods.pod_variables import pod_variables


@pytest.mark.parametrize(
    ("observed", "code", "message"),
    [
        (Observed(), None, ""),
        (Observed(False, HEAD_GONE_SECONDS - 1), None, ""),  # a short silence
        (Observed(False, HEAD_GONE_SECONDS), ExitCode.WORKER_LOST, "digits-controller:6379 has not answered for 15 s"),
        (
            Observed(False, HEAD_GONE_SECONDS - 1, raylet=False),
            None,
            "",
        ),  # a raylet that ends after its head has not failed
        (Observed(raylet=False), ExitCode.WORKER_LOST, "Ray ended in this pod"),
        (Observed(raylet=False, controller_ended=True), None, ""),  # the head is about to exit, too
        (Observed(False, 1.0, raylet=False, controller_ended=True), ExitCode.COMPLETE, ""),
        (Observed(controller_ended=True, to_restart=True), None, ""),
        (Observed(False, 1.0, raylet=False, controller_ended=True, to_restart=True), ExitCode.RESTART_IN_PLACE, ""),
        (Observed(raylet=False, oom_kills=2), ExitCode.HOST_OUT_OF_MEMORY, "the kernel killed 2 of this container's"),
    ],
)
def test_a_worker_exits_with_its_head_or_its_raylet(observed: Observed, code: ExitCode | None, message: str) -> None:
    found = exit_of_worker(observed, "digits-controller:6379")
    if code is None:
        assert found is None
    else:
        assert found is not None
        assert found[0] == code
        assert message in found[1]


def test_a_head_that_answers_again_is_not_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now, head_answers = [100.0], [False, True, False, False]
    answers = iter(each for head in head_answers for each in (head, True))
    monkeypatch.setattr(worker_pod, "_answers", lambda _address: next(answers))

    def sleep(_seconds: float) -> None:
        now[0] += HEAD_GONE_SECONDS - 1

    monkeypatch.setattr(worker_pod, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    environment = WorkerEnvironment.read(pod_variables(tmp_path))
    code, message = worker_pod._stay(environment, ("10.0.0.1", 6379))
    assert code == ExitCode.WORKER_LOST
    assert "has not answered for 28 s" in message
    assert list(answers) == []


NEXT = RequiredAttempt(number=4, plan_generation=2)


def decided(attempt: int = 3, **decision: Any) -> StepReportStatus:
    return StepReportStatus(attempt=3, decision=ExitDecision(attempt=attempt, **decision))


IN_PLACE = decided(next_attempt=4, plan_generation=2)


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
        ([NoAnswer("away"), None, StepReportStatus(attempt=3), IN_PLACE], NEXT, 3.0),
        ([decided(attempt=2, next_attempt=3, plan_generation=1), IN_PLACE], NEXT, 1.0),
        ([decided()], None, 0.0),
        ([StepReportStatus(attempt=3)] * 61, None, 60.0),
    ],
    ids=["a short outage of the API server", "about an earlier attempt", "the job has failed", "an absent operator"],
)
def test_the_wait_for_a_decision_lasts_a_minute_at_most(
    answers: list[Any], expected: RequiredAttempt | None, seconds: float, clock: list[float]
) -> None:
    def read() -> StepReportStatus | None:
        answer: NoAnswer | StepReportStatus | None = answers.pop(0)
        if isinstance(answer, NoAnswer):
            raise answer
        return answer

    assert wait_for_restart(read, attempt=3) == expected
    assert clock == [100.0 + seconds]
