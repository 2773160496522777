"""Variables and settings of a pod, the attempt with which it begins, and reports of a controller that cannot start."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_api.manifest import load_manifest
from rljob_api.step_report import MemoryPressure
from rljob_api.termination_message import read_termination_message
from rljob_memory.sample import MemorySample
from rljob_memory.sizes import GIB
from rljob_testing.memory_plans import memory_plan
from rljob_testing.runs import write_manifest
from rljob_trainer.pods import attempt_start
from rljob_trainer.pods.attempt_start import OutdatedSettings, RequiredAttempt, announce_restart, start_attempt
from rljob_trainer.pods.controller_pod import AttemptListener, advice_about_files, run_controller
from rljob_trainer.pods.environment import ControllerEnvironment, InvalidEnvironment, WorkerEnvironment
from rljob_trainer.runtime.job_run import Outcome
from tests.unit.pods.pod_variables import pod_variables, write_settings


def test_the_pod_environment_is_read_with_its_defaults() -> None:
    environment = WorkerEnvironment.read(pod_variables(Path("/pod"), RLJOB_RUN_DIR="", RLJOB_TERMINATION_LOG=""))
    assert environment.ray_head_address == ("digits-controller.train.svc", 6379)
    assert str(environment.ready_file) == "/run/rljob/ready"
    assert str(environment.termination_log) == "/dev/termination-log"
    assert (environment.ray_first_port, environment.model_dir) == (6380, None)
    assert "0123456789abcdef" not in repr(environment), "the token"


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"RLJOB_NAME": "", "RLJOB_ATTEMPT": "first"}, r"NAME: .*is not set.*ATTEMPT: .*integer.*, found 'first'"),
        ({"RLJOB_ATTEMPT": "0"}, r"RLJOB_ATTEMPT: .*found '0'"),
        ({"RLJOB_RAY_HEAD": "digits-controller"}, r"RLJOB_RAY_HEAD: .*found 'digits-controller'"),
        ({"RAY_AUTH_TOKEN": ""}, r"RAY_AUTH_TOKEN: .*it is not set"),
        ({"RLJOB_INDEX": "1"}, r"RLJOB_INDEX must be below RLJOB_WORKERS \(1\), found 1"),
    ],
)
def test_each_wrong_variable_is_named_with_its_value(tmp_path: Path, wrong: dict[str, str], expected: str) -> None:
    with pytest.raises(InvalidEnvironment, match=expected):
        WorkerEnvironment.read(pod_variables(tmp_path, **wrong))


def test_a_wrong_field_of_the_plan_is_named(tmp_path: Path) -> None:
    plan = memory_plan().model_dump(mode="json", by_alias=True) | {"kvCache": -1}
    (tmp_path / "attempt.json").write_text(json.dumps({"attempt": 3, "memoryPlan": plan}))
    with pytest.raises(InvalidEnvironment, match=r"memoryPlan.kvCache"):
        start_attempt(environment(tmp_path))


@pytest.mark.parametrize(
    ("spec", "variables", "code", "expected"),
    [
        ({}, {"RLJOB_ATTEMPT": ""}, ExitCode.INVALID_MANIFEST, "RLJOB_ATTEMPT"),
        ({"algorithm": {"steps": -1}}, {}, ExitCode.INVALID_MANIFEST, "spec.algorithm.steps"),
        ({"policy": {"replicas": 2}}, {}, ExitCode.INVALID_MANIFEST, "policy.replicas (2), found 1"),
        ({}, {"RLJOB_OUTPUT": "{}/other"}, ExitCode.OUTPUT_UNAVAILABLE, "thesis.tex"),
        ({}, {"RLJOB_MANIFEST": "{}/unreadable"}, ExitCode.ERROR, "unexpected RuntimeError: no such thing"),
    ],
)
def test_a_controller_that_cannot_start_reports_it_to_the_kubelet(
    spec: Any, variables: dict[str, str], code: ExitCode, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(path: Path) -> Any:
        if path.name == "unreadable":
            raise RuntimeError("no such thing")
        return load_manifest(path)

    monkeypatch.setattr("rljob_trainer.pods.attempt_start.load_manifest", load)
    write_settings(tmp_path)
    write_manifest(tmp_path / "job.yaml", **spec)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    changed = {name: value.format(tmp_path) for name, value in variables.items()}
    assert run_controller(pod_variables(tmp_path, **changed)) == code
    message = read_termination_message((tmp_path / "termination-log").read_text())
    assert message is not None
    assert message.exit_code == code
    assert expected in message.message


def environment(directory: Path, created_for: int = 3, plan_generation: int = 1) -> WorkerEnvironment:
    created = {"RLJOB_ATTEMPT": str(created_for), "RLJOB_PLAN_GENERATION": str(plan_generation)}
    return WorkerEnvironment.read(pod_variables(directory, RLJOB_RESTARTS_IN_PLACE="1", **created))


@pytest.fixture
def refreshes(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Refreshes of the volume to come, one at each pause of a clock that only pauses advance."""
    now, waiting = [100.0], list[Callable[[], None]]()

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


def test_a_restarted_container_waits_for_the_announced_plan(
    tmp_path: Path, refreshes: list[Callable[[], None]]
) -> None:
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


def test_a_new_pod_waits_out_the_file_of_an_earlier_pod_of_its_node(
    tmp_path: Path, refreshes: list[Callable[[], None]]
) -> None:
    this = environment(tmp_path, created_for=4, plan_generation=2)
    write_settings(tmp_path, 3, memory_plan(generation=1))
    refreshes += [
        lambda: write_settings(tmp_path, 4, memory_plan(generation=1)),
        lambda: write_settings(tmp_path, 5, memory_plan(generation=4)),
    ]
    assert start_attempt(this).attempt == 5, "a later one than that it was created for"


@pytest.mark.usefixtures("refreshes")
def test_a_container_that_restarts_by_itself_does_not_rejoin_its_attempt(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("code", "place", "task_dir", "advised"),
    [
        (ExitCode.BAD_INPUT, "/etc/rljob", "", True),
        (ExitCode.BAD_INPUT, "/data", "", False),
        (ExitCode.BAD_INPUT, "/etc/rljob", "/var/lib/rljob-task", False),
        (ExitCode.WORKER_LOST, "/etc/rljob", "", False),
    ],
)
def test_advice_is_given_only_if_it_helps(
    tmp_path: Path, code: ExitCode, place: str, task_dir: str, advised: bool
) -> None:
    variables = pod_variables(tmp_path, RLJOB_MANIFEST="/etc/rljob/job.yaml", RLJOB_TASK_DIR=task_dir)
    outcome = Outcome(code, f"cannot import rewards; expected rewards.py in {place} or an installed module", 0)
    advice = advice_about_files(outcome, ControllerEnvironment.read(variables))
    assert ("task.files" in advice) is advised


def test_a_pod_is_ready_when_the_roles_work_on_a_step_and_not_before(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    listener = AttemptListener(None, 2, ready)
    listener.attempt_began(memory_plan(), [], lambda _text: None)
    assert not ready.exists()
    listener.phase_began(1, "sync")
    assert ready.exists()
    listener.close(1)


def test_the_container_with_least_room_is_reported_until_it_has_more(tmp_path: Path) -> None:
    reported: list[MemoryPressure | None] = []

    class CollectingListener(AttemptListener):
        def _set(self, *, urgent: bool = False, **fields: Any) -> None:
            reported.append(fields["memory_pressure"])

    def container(used: int, limit: int = 16) -> MemorySample:
        return MemorySample(host_used_bytes=used * GIB, host_limit_bytes=limit * GIB)

    listener = CollectingListener(None, 2, tmp_path / "ready")
    for tightest in (container(3), container(16), container(16), container(16, limit=24)):
        listener.host_memory({None: container(1), "policy-2": tightest, "rollout-0": MemorySample()})
    listener.host_memory({None: container(16)})
    first, second, third = reported
    assert (first and first.role, first and first.rank) == ("policy", 2)
    assert second is None, "its limit was raised"
    assert third is not None
    assert third.role == "controller"
