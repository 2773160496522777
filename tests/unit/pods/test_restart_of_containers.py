"""Restarts in place: the wait of the controller, and the start of restarted containers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_trainer.pods import restart_in_place
from rljob_trainer.pods.environment import WorkerEnvironment
from rljob_trainer.pods.head_watch import HeadWatch, Observed
from rljob_trainer.pods.restart_in_place import (
    MAX_STALE_STARTS,
    NoNewEnvironment,
    StaleEnvironment,
    next_for,
    prepare_pod,
    wait_for_restart,
)
from rljob_trainer.step_report.api_server import NoAnswer
from tests.unit.pods.pod_variables import pod_variables

ENDED: dict[str, Any] = {"number": 3, "reason": "DeviceOutOfMemory"}
IN_PLACE: dict[str, Any] = {"number": 4, "podsOfAttempt": 3}


def status(*attempts: dict[str, Any], failed: str = "False") -> dict[str, Any]:
    return {"attempts": list(attempts), "conditions": [{"type": "Failed", "status": failed}]}


@pytest.mark.parametrize(
    ("found", "decided"),
    [
        ({}, "Wait"),
        (status({"number": 3}), "Wait"),
        (status(ENDED), "Wait"),
        (status(ENDED, IN_PLACE), "Restart"),
        (status(ENDED, {"number": 4}), "End"),
        (status(ENDED, failed="True"), "End"),
    ],
    ids=[
        "no status yet",
        "not seen yet",
        "the plan is changed",
        "the next attempt is in these pods",
        "the next attempt has pods of its own",
        "the job has failed",
    ],
)
def test_the_status_decides_between_restart_exit_and_wait(found: dict[str, Any], decided: str) -> None:
    assert next_for(found, attempt=3) == decided


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only pauses advance."""
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(restart_in_place, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return now


def test_a_short_outage_of_the_api_server_is_tolerated(no_pause: list[float]) -> None:
    answers = iter([NoAnswer("away"), status(ENDED), status(ENDED, IN_PLACE)])

    def read() -> Mapping[str, Any]:
        answer = next(answers)
        if isinstance(answer, NoAnswer):
            raise answer
        return {"status": answer}

    assert wait_for_restart(read, attempt=3)
    assert no_pause == [102.0]


def test_the_wait_for_an_absent_operator_ends_after_a_minute(no_pause: list[float]) -> None:
    assert not wait_for_restart(lambda: {"status": status({"number": 3})}, attempt=3)
    assert no_pause == [160.0]


def environment(directory: Path, attempt: int) -> WorkerEnvironment:
    variables = pod_variables(directory, RLJOB_ATTEMPT=str(attempt), RLJOB_RESTARTS_IN_PLACE="1")
    return WorkerEnvironment.read(variables)


def test_a_restarted_container_removes_files_of_the_previous_one(tmp_path: Path) -> None:
    prepare_pod(environment(tmp_path, attempt=3))
    left = environment(tmp_path, attempt=3)
    for file in (left.ready_file, left.controller_ended_file, left.restart_file):
        file.touch()
    prepare_pod(environment(tmp_path, attempt=4))
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["attempt"]


@pytest.mark.usefixtures("no_pause")
def test_containers_with_a_stale_environment_are_restarted_again(tmp_path: Path) -> None:
    prepare_pod(environment(tmp_path, attempt=3))
    with pytest.raises(StaleEnvironment) as caught:
        prepare_pod(environment(tmp_path, attempt=3))
    assert caught.value.exit_code == ExitCode.RESTART_IN_PLACE
    prepare_pod(environment(tmp_path, attempt=4))


@pytest.mark.usefixtures("no_pause")
def test_containers_without_a_new_environment_exit_for_good(tmp_path: Path) -> None:
    prepare_pod(environment(tmp_path, attempt=3))
    for _ in range(MAX_STALE_STARTS):
        with pytest.raises(StaleEnvironment):
            prepare_pod(environment(tmp_path, attempt=3))
    with pytest.raises(NoNewEnvironment, match="still that of attempt 3; replace the pod") as caught:
        prepare_pod(environment(tmp_path, attempt=3))
    assert caught.value.exit_code == ExitCode.ERROR


@pytest.mark.usefixtures("no_pause")
def test_each_restart_in_place_may_find_its_environment_late(tmp_path: Path) -> None:
    for attempt in (3, 4, 5):
        prepare_pod(environment(tmp_path, attempt))
        for _ in range(MAX_STALE_STARTS):
            with pytest.raises(StaleEnvironment):
                prepare_pod(environment(tmp_path, attempt))


def test_a_worker_that_is_to_be_restarted_stays_until_the_old_head_is_gone() -> None:
    watch = HeadWatch("digits-controller.train.svc:6379", now=100.0)
    assert watch.check(Observed(head=True, raylet=True, controller_ended=True, to_restart=True), 101.0) is None
    ending = watch.check(Observed(head=False, raylet=False, controller_ended=True, to_restart=True), 102.0)
    assert ending is not None
    assert ending.exit_code == ExitCode.RESTART_IN_PLACE
