"""Required environment variables of a pod, and errors about wrong ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_api.termination_message import read_termination_message
from rljob_testing.memory_plans import memory_plan
from rljob_testing.runs import write_manifest
from rljob_trainer.pods.attempt_start import start_attempt
from rljob_trainer.pods.controller_pod import run_controller
from rljob_trainer.pods.environment import InvalidEnvironment, WorkerEnvironment
from tests.unit.pods.pod_variables import pod_variables, write_settings

PLAN = memory_plan()


def test_the_pod_environment_is_read_with_its_defaults() -> None:
    environment = WorkerEnvironment.read(pod_variables(Path("/pod"), RLJOB_RUN_DIR="", RLJOB_TERMINATION_LOG=""))
    assert environment.ray_head_address == ("digits-controller.train.svc", 6379)
    assert str(environment.ready_file) == "/run/rljob/ready"
    assert str(environment.termination_log) == "/dev/termination-log"
    assert environment.ray_first_port == 6380
    assert environment.model_dir is None


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RLJOB_ATTEMPT", "first", r"RLJOB_ATTEMPT: .*integer.*, found 'first'"),
        ("RLJOB_ATTEMPT", "0", r"RLJOB_ATTEMPT: .*found '0'"),
        ("RLJOB_NAME", "", r"RLJOB_NAME: .*it is not set"),
        ("RLJOB_RAY_HEAD", "digits-controller", r"RLJOB_RAY_HEAD: .*found 'digits-controller'"),
        ("POD_IP", "", r"POD_IP: .*it is not set"),
        ("RAY_AUTH_TOKEN", "", r"RAY_AUTH_TOKEN: .*it is not set"),
        ("RLJOB_INDEX", "1", r"RLJOB_INDEX must be below RLJOB_WORKERS \(1\), found 1"),
    ],
)
def test_a_wrong_variable_is_named_with_its_value(tmp_path: Path, name: str, value: str, said: str) -> None:
    with pytest.raises(InvalidEnvironment, match=said):
        WorkerEnvironment.read(pod_variables(tmp_path, **{name: value}))


def test_a_wrong_field_of_the_plan_is_named(tmp_path: Path) -> None:
    plan = PLAN.model_dump(mode="json", by_alias=True) | {"kvCache": -1}
    (tmp_path / "attempt.json").write_text(json.dumps({"attempt": 3, "memoryPlan": plan}))
    with pytest.raises(InvalidEnvironment, match=r"memoryPlan.kvCache"):
        start_attempt(WorkerEnvironment.read(pod_variables(tmp_path)))


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidEnvironment, match=r"RLJOB_NAME.*RLJOB_ATTEMPT"):
        WorkerEnvironment.read(pod_variables(tmp_path, RLJOB_NAME="", RLJOB_ATTEMPT="x"))


def test_the_token_is_in_no_text_of_the_environment(tmp_path: Path) -> None:
    assert "0123456789abcdef" not in repr(WorkerEnvironment.read(pod_variables(tmp_path)))


class TestAControllerThatCannotStart:
    def test_a_broken_environment_is_reported_to_the_kubelet(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code = run_controller(pod_variables(tmp_path, RLJOB_ATTEMPT=""))
        assert code == ExitCode.INVALID_MANIFEST
        assert "RLJOB_ATTEMPT" in capsys.readouterr().out
        self.assert_told(tmp_path, ExitCode.INVALID_MANIFEST, "RLJOB_ATTEMPT")

    def test_an_invalid_manifest_is_reported_to_the_kubelet(self, tmp_path: Path) -> None:
        write_settings(tmp_path)
        write_manifest(tmp_path / "job.yaml", algorithm={"steps": -1})
        assert run_controller(pod_variables(tmp_path)) == ExitCode.INVALID_MANIFEST
        self.assert_told(tmp_path, ExitCode.INVALID_MANIFEST, "spec.algorithm.steps")

    def test_a_wrong_number_of_pods_is_reported_to_the_kubelet(self, tmp_path: Path) -> None:
        write_settings(tmp_path)
        write_manifest(tmp_path / "job.yaml", policy={"replicas": 2})
        assert run_controller(pod_variables(tmp_path)) == ExitCode.INVALID_MANIFEST
        self.assert_told(tmp_path, ExitCode.INVALID_MANIFEST, "policy.replicas (2), found 1")

    def test_a_volume_with_other_files_is_reported_to_the_kubelet(self, tmp_path: Path) -> None:
        write_settings(tmp_path)
        write_manifest(tmp_path / "job.yaml")
        (tmp_path / "volume").mkdir()
        (tmp_path / "volume" / "thesis.tex").touch()
        assert run_controller(pod_variables(tmp_path)) == ExitCode.OUTPUT_UNAVAILABLE
        self.assert_told(tmp_path, ExitCode.OUTPUT_UNAVAILABLE, "thesis.tex")

    def test_an_unexpected_error_is_reported_to_the_kubelet(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_settings(tmp_path)

        def fail(_path: Path) -> None:
            raise RuntimeError("no such thing")

        monkeypatch.setattr("rljob_trainer.pods.attempt_start.load_manifest", fail)
        assert run_controller(pod_variables(tmp_path)) == ExitCode.ERROR
        self.assert_told(tmp_path, ExitCode.ERROR, "unexpected RuntimeError: no such thing")

    @staticmethod
    def assert_told(directory: Path, code: ExitCode, said: str) -> None:
        message = read_termination_message((directory / "termination-log").read_text())
        assert message is not None
        assert message.exit_code == code
        assert said in message.message
