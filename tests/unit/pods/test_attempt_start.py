"""An attempt begins with its own settings, however late the node refreshes the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_testing.memory_plans import memory_plan
from rljob_trainer.pods import attempt_start
from rljob_trainer.pods.attempt_start import OutdatedSettings, RequiredAttempt, announce_restart, start_attempt
from rljob_trainer.pods.environment import InvalidEnvironment, WorkerEnvironment
from tests.unit.pods.pod_variables import pod_variables, write_settings


def environment(directory: Path, created_for: int = 3, plan_generation: int = 1) -> WorkerEnvironment:
    created = {"RLJOB_ATTEMPT": str(created_for), "RLJOB_PLAN_GENERATION": str(plan_generation)}
    return WorkerEnvironment.read(pod_variables(directory, RLJOB_RESTARTS_IN_PLACE="1", **created))


Refresh = Callable[[], None]


@pytest.fixture
def refreshes(monkeypatch: pytest.MonkeyPatch) -> list[Refresh]:
    """Refreshes of the volume to come, one at each pause of a clock that only pauses advance."""
    now, waiting = [100.0], []  # type: tuple[list[float], list[Refresh]]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if waiting:
            waiting.pop(0)()

    monkeypatch.setattr(attempt_start, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return waiting


def test_a_restarted_container_removes_files_of_the_previous_one(tmp_path: Path) -> None:
    write_settings(tmp_path, 3)
    this = environment(tmp_path)
    start_attempt(this)
    for file in (this.ready_file, this.controller_ended_file):
        file.touch()
    announce_restart(this, RequiredAttempt(number=4, plan_generation=1))
    write_settings(tmp_path, 4)
    assert start_attempt(this).attempt == 4
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["attempt"]


def test_a_restarted_container_waits_for_the_announced_plan(tmp_path: Path, refreshes: list[Refresh]) -> None:
    """The operator may have written the next attempt with one plan, and then recorded it with another one."""
    write_settings(tmp_path, 3)
    this = environment(tmp_path)
    start_attempt(this)
    announce_restart(this, RequiredAttempt(number=4, plan_generation=3))
    refreshes += [
        lambda: None,
        lambda: write_settings(tmp_path, 4, memory_plan(generation=2)),
        lambda: write_settings(tmp_path, 4, memory_plan(generation=3)),
    ]
    settings = start_attempt(this)
    assert (settings.attempt, settings.plan_generation) == (4, 3)
    assert refreshes == []


def test_a_new_pod_waits_out_the_file_of_an_earlier_pod_of_its_node(tmp_path: Path, refreshes: list[Refresh]) -> None:
    write_settings(tmp_path, 3, memory_plan(generation=1))
    refreshes += [
        lambda: write_settings(tmp_path, 4, memory_plan(generation=1)),
        lambda: write_settings(tmp_path, 4, memory_plan(generation=2)),
    ]
    settings = start_attempt(environment(tmp_path, created_for=4, plan_generation=2))
    assert (settings.attempt, settings.plan_generation) == (4, 2)


def test_a_pod_may_begin_with_a_later_attempt(tmp_path: Path) -> None:
    write_settings(tmp_path, 5, memory_plan(generation=4))
    assert start_attempt(environment(tmp_path, created_for=4, plan_generation=2)).attempt == 5


@pytest.mark.usefixtures("refreshes")
def test_a_container_that_restarts_unasked_does_not_rejoin_its_attempt(tmp_path: Path) -> None:
    write_settings(tmp_path, 3)
    start_attempt(environment(tmp_path))
    with pytest.raises(OutdatedSettings, match=r"expected attempt 4 with memory plan 1 .* found attempt 3") as caught:
        start_attempt(environment(tmp_path))
    assert caught.value.exit_code == ExitCode.ERROR
    write_settings(tmp_path, 4)
    assert start_attempt(environment(tmp_path)).attempt == 4


@pytest.mark.parametrize("text", [None, "", "{", '{"attempt": 0}'])
def test_settings_that_cannot_be_read_are_reported_at_once(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "attempt.json").write_text(text)
    with pytest.raises(InvalidEnvironment, match="RLJOB_ATTEMPT_SETTINGS"):
        start_attempt(environment(tmp_path))
