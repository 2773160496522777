"""Jobs that `rljob run` refuses before it starts a process."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rljob_api.exit_codes import ExitCode
from rljob_api.manifest import load_manifest
from rljob_client.errors import OutputUnavailable
from rljob_client.run_directory.durable_files import disk_full_message
from rljob_client.run_directory.ledger import Ledger
from rljob_memory.recovery import GiveUp, GiveUpReason
from rljob_trainer.ledger.output_directory import OutputDirectory
from rljob_trainer.models.random_model import resolve
from rljob_trainer.runtime.job_run import JobRun, identity
from rljob_trainer.runtime.run_command import LocalPlacement, RunOptions, run_manifest
from tests.unit.ledger.samples import write_ledger

MANIFEST = """
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: refused}
spec:
  model: {uri: "file:///no/such/model"}
  task: {name: digits}
  algorithm: {steps: 8}
  rollout: {engineArgs: {enforce_eagerly: true}}
"""


def test_unknown_engine_arguments_are_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text(MANIFEST)
    assert run_manifest(manifest, RunOptions(output=tmp_path / "run")) is ExitCode.BAD_INPUT
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "engineArgs.enforce_eagerly: is not an engine argument of the installed vLLM: did you mean enforce_eager? Logs:"
        in (printed)
    )


@pytest.mark.parametrize(("status", "is_kept"), [("Complete", True), ("Stopped", False), ("Failed", False)])
def test_a_refused_resume_keeps_the_summary_of_a_complete_run(status: str, is_kept: bool, tmp_path: Path) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text(MANIFEST)
    run, job = OutputDirectory(tmp_path / "run"), load_manifest(manifest)
    with run.open(MANIFEST, identity(job)):
        write_ledger(run.path, [0.5] * 4)
        run.summary.write_text(before := json.dumps({"status": status}))
    assert run_manifest(manifest, RunOptions(output=run.path)) is ExitCode.BAD_INPUT
    assert (run.summary.read_text() == before) is is_kept


def test_a_complete_run_of_more_steps_than_the_manifest_keeps_its_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text(MANIFEST)
    run = OutputDirectory(tmp_path / "run")
    with run.open(MANIFEST, identity(load_manifest(manifest))):
        write_ledger(run.path, [0.5] * 20)
        run.model.mkdir()
        run.summary.write_text(before := json.dumps({"status": "Complete", "total_steps": 20}))
    assert run_manifest(manifest, RunOptions(output=run.path)) is ExitCode.COMPLETE
    assert run.summary.read_text() == before
    assert "20 committed; algorithm.steps is 8" in capsys.readouterr().out


@pytest.mark.parametrize(("committed", "hint"), [(3, "To resume at step 4, run"), (8, "To write the model, run")])
def test_a_full_disk_has_one_advice_about_the_next_command(committed: int, hint: str, tmp_path: Path) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text(MANIFEST)
    with Ledger(write_ledger(tmp_path / "run", [0.5] * committed)) as ledger:
        run = JobRun(load_manifest(manifest), tmp_path, OutputDirectory(tmp_path / "run"), LocalPlacement("cpu"))
        full = OutputUnavailable(disk_full_message(tmp_path, 100))
        message = run._failed(ledger, full, GiveUp(GiveUpReason.LEFT_TO_SUPERVISOR, "")).message
    assert f"Free some space. {hint} the same command again. Logs: " in message
    assert message.count("the same command") == 1


def test_a_failed_run_without_plots_keeps_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text(MANIFEST)
    assert run_manifest(manifest, RunOptions(output=tmp_path / "run", plot=True)) is ExitCode.BAD_INPUT
    assert "nothing to draw yet" in capsys.readouterr().err


def test_plots_that_could_not_be_drawn_are_refused_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    manifest = tmp_path / "job.yaml"
    manifest.write_text(MANIFEST)
    run = RunOptions(output=tmp_path / "run", plot=True)
    assert run_manifest(manifest, run) is ExitCode.INVALID_MANIFEST
    assert "--plot: expected the package matplotlib, found none" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_job_of_another_trainer_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text(MANIFEST + "  trainer: {image: trl:1}\n")
    assert run_manifest(manifest, RunOptions(output=tmp_path / "run")) is ExitCode.INVALID_MANIFEST
    printed = capsys.readouterr()
    assert (
        f"{manifest}:10: spec.trainer: expected RLJob's own trainer, found another, which runs on a cluster only: "
        f"kubectl apply -f {manifest}\n" == printed.err
    )
    assert printed.out == ""
    assert not (tmp_path / "run").exists()


def test_fields_that_a_run_ignores_are_reported_with_their_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text(MANIFEST + "  queueName: gpus\n  memory: {policyOffload: Enabled}\n")
    assert run_manifest(manifest, RunOptions(output=tmp_path / "run", device="cpu")) is ExitCode.BAD_INPUT
    assert capsys.readouterr().err.splitlines() == [
        f"{manifest}:11: warning: spec.memory.policyOffload: has no effect without GPUs",
        f"{manifest}:10: note: spec.queueName: rljob run ignores it: it is for pods on a cluster",
    ]


def test_8_bits_without_a_gpu_are_refused_before_the_model_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text(MANIFEST.replace("engineArgs: {enforce_eagerly: true}", "kvCacheDtype: Fp8"))
    assert run_manifest(manifest, RunOptions(output=tmp_path / "run", device="cpu")) is ExitCode.BAD_INPUT
    printed = " ".join(capsys.readouterr().out.split())
    assert "rollout.kvCacheDtype: expected Auto, because vLLM on the CPU has no 8-bit floating point" in printed
    assert "reading the model" not in printed


def test_a_task_that_forbids_stale_rollouts_is_refused_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "fresh_only.py").write_text("MAX_STALENESS = 0\ndef reward(answer, record):\n    return 0\n")
    manifest = tmp_path / "job.yaml"
    stale = "algorithm: {steps: 8, maxStaleness: 1}\n  topology: Disaggregated"
    manifest.write_text(
        MANIFEST.replace("name: digits", "name: digits, reward: fresh_only:reward")
        .replace("algorithm: {steps: 8}", stale)
        .replace("engineArgs: {enforce_eagerly: true}", "gpusPerReplica: 0")
        .replace("task:", "policy: {gpusPerReplica: 0}\n  task:")
    )
    assert run_manifest(manifest, RunOptions(output=tmp_path / "run", device="cpu")) is ExitCode.BAD_INPUT
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "algorithm.maxStaleness: expected at most 0, because fresh_only (task.reward) sets MAX_STALENESS = 0, found 1; "
        "write algorithm: {maxStaleness: 0}, or change the task" in printed
    )
    assert "no/such/model" not in printed, "it is refused before the model is read"


@pytest.mark.parametrize("allowed", [True, False])
def test_an_unknown_fault_is_named_even_if_none_is_allowed(
    allowed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text(MANIFEST + ("  faultInjection: {enabled: true}\n" if allowed else ""))
    options = RunOptions(output=tmp_path / "run", faults=("Foo@update:1",))
    assert run_manifest(manifest, options) is ExitCode.INVALID_MANIFEST
    assert "--fault Foo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "found"),
    [("steps: 3\n", "found: Invalid JSON: expected"), ('{"kvCache": "4Gi"}', "found: emptyCache: Field required\n")],
)
def test_a_file_that_is_no_plan_is_refused_in_one_line(
    content: str, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest, plan = tmp_path / "job.yaml", tmp_path / "plan.json"
    manifest.write_text(MANIFEST)
    plan.write_text(content)
    assert run_manifest(manifest, RunOptions(output=tmp_path / "run", plan=plan)) is ExitCode.INVALID_MANIFEST
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert found in printed


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return shutil.copytree(resolve("qwen3?hidden=32&layers=1", tmp_path), tmp_path / "model")


def refusal(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    manifest = tmp_path / "job.yaml"
    manifest.write_text(MANIFEST.replace("/no/such/model", str(model)).replace("enforce_eagerly", "enforce_eager"))
    assert run_manifest(manifest, RunOptions(output=tmp_path / "run", device="cpu")) is ExitCode.BAD_INPUT
    return " ".join(capsys.readouterr().out.split())


def test_a_model_with_dynamic_rope_is_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((model / "config.json").read_text())
    config.pop("rope_parameters", None)
    (model / "config.json").write_text(json.dumps(config | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}))
    assert "rope_scaling of the type dynamic" in refusal(model, tmp_path, capsys)


def test_a_mixture_of_experts_is_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = model / "model.safetensors"
    expert = {"model.layers.0.mlp.experts.0.up_proj.weight": np.zeros((2, 2), np.float32)}
    save_file(load_file(file) | expert, file, metadata={"format": "pt"})
    assert "found a mixture of experts" in refusal(model, tmp_path, capsys)
