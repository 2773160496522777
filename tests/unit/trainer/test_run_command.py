"""`rljob run`, called in this process: refused jobs, restarts, and runs that are given up."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rljob_api.exit_codes import ExitCode
from rljob_api.job import RLJobSpec
from rljob_api.manifest import load_manifest
from rljob_client.errors import BadInput, OutputUnavailable, RunError
from rljob_client.run_directory.durable_files import disk_full_message
from rljob_client.run_directory.ledger import Ledger
from rljob_memory.sizes import GIB
from rljob_trainer.display.run_display import RunDisplay
from rljob_trainer.errors import DeviceOutOfMemory, PhaseDeadlineExceeded, WorkerLost
from rljob_trainer.ledger.output_directory import OutputDirectory
from rljob_trainer.models.random_model import resolve
from rljob_trainer.runtime import attempt_plan, run_command
from rljob_trainer.runtime.attempt import Attempt
from rljob_trainer.runtime.attempt_plan import Supervision
from rljob_trainer.runtime.job_run import JobRun, Outcome, identity
from rljob_trainer.runtime.run_command import LocalPlacement, run_manifest
from tests.unit.ledger.samples import step_record, write_ledger

MANIFEST = """
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: short}
spec:
  model: {uri: "file:///no/such/model"}
  task: {name: digits}
  algorithm: {steps: 8}
  recovery: {maxRestarts: 1}
"""


class Command:
    """`rljob run` in a directory, with its output."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.manifest = directory / "job.yaml"
        self.output = OutputDirectory(directory / "run")
        self.manifest.write_text(MANIFEST)
        self._capsys = capsys
        self.printed = ""

    def __call__(self, *more: str, **options: Any) -> ExitCode:
        """`more`: lines of the manifest below `spec`, or `old -> new` in the lines above."""
        text = MANIFEST
        for line in more:
            old, arrow, new = line.partition(" -> ")
            text = text.replace(old, new) if arrow else f"{text}  {line}\n"
        self.manifest.write_text(text)
        code = run_manifest(self.manifest, **{"output": self.output.path, **options})
        self.lines = self._capsys.readouterr()
        self.printed = " ".join((self.lines.out + self.lines.err).split())
        return code

    @property
    def exit_reason(self) -> str:
        return str(json.loads(self.output.summary.read_bytes())["exit_reason"])


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, capsys)


WRONG_ARGUMENT = "rollout: {engineArgs: {enforce_eagerly: true}}"
STALE = (
    "topology: Disaggregated",
    "rollout: {gpusPerReplica: 0}",
    "policy: {gpusPerReplica: 0}",
    "steps: 8 -> steps: 8, maxStaleness: 1",
    "name: digits -> name: digits, reward: fresh_only:reward",
)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            [WRONG_ARGUMENT],
            "enforce_eagerly: is not an engine argument of the installed vLLM: did you mean enforce_eager? Logs:",
        ),
        (
            [WRONG_ARGUMENT, "queueName: gpus"],
            "job.yaml:11: note: spec.queueName: rljob run ignores it: it is for pods",
        ),
        (
            [WRONG_ARGUMENT, "memory: {policyOffload: Enabled}"],
            "job.yaml:11: warning: spec.memory.policyOffload: has no effect without GPUs",
        ),
        (["rollout: {kvCacheDtype: Fp8}"], "rollout.kvCacheDtype: expected Auto, because vLLM on the CPU has no 8-bit"),
        (
            STALE,
            "maxStaleness: expected at most 0, because fresh_only (task.reward) sets MAX_STALENESS = 0, found 1; "
            "write algorithm: {maxStaleness: 0}, or change the task",
        ),
    ],
    ids=["engine argument", "field of a cluster", "field without effect", "8 bits", "stale rollouts"],
)
def test_a_job_that_cannot_run_is_refused_before_its_model_is_read(
    lines: list[str], expected: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "fresh_only.py").write_text("MAX_STALENESS = 0\ndef reward(answer, record):\n    return 0\n")
    assert command(*lines, device="cpu", report=True) is ExitCode.BAD_INPUT
    assert expected in command.printed
    assert not [text for text in ("reading the model", "no/such/model") if text in command.printed]
    assert (command.output.path / "report.html").is_file()


@pytest.mark.parametrize(
    ("lines", "options", "plan", "expected"),
    [
        (
            ["trainer: {image: trl:1}"],
            {},
            "",
            ":10: spec.trainer: expected RLJob's own trainer, found another, which runs",
        ),
        ([], {"faults": ("Foo@update:1",)}, "", "--fault Foo"),
        (["faultInjection: {enabled: true}"], {"faults": ("Foo@update:1",)}, "", "--fault Foo"),
        ([], {}, "steps: 3\n", "found: Invalid JSON: expected"),
        ([], {}, '{"kvCache": "4Gi"}', "found: emptyCache: Field required"),
        (
            [],
            {"settings": ["algorithm.steps=x"]},
            "",
            "--set algorithm.steps=x: spec.algorithm.steps: expected a whole",
        ),
    ],
)
def test_an_invalid_command_leaves_no_output(
    lines: list[str], options: Any, plan: str, expected: str, command: Command
) -> None:
    if plan:
        options = {"plan": command.manifest.with_name("plan.json")}
        options["plan"].write_text(plan)
    assert command(*lines, **options) is ExitCode.INVALID_MANIFEST
    assert expected in command.printed
    assert (command.lines.out, command.lines.err.count("\n")) == ("", 1)
    assert not command.output.path.exists()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return shutil.copytree(resolve("qwen3?hidden=32&layers=1", tmp_path), tmp_path / "model")


def with_dynamic_rope(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config.pop("rope_parameters", None)
    (model / "config.json").write_text(json.dumps(config | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}))


def with_experts(model: Path) -> None:
    file = model / "model.safetensors"
    expert = {"model.layers.0.mlp.experts.0.up_proj.weight": np.zeros((2, 2), np.float32)}
    save_file(load_file(file) | expert, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "expected"),
    [(with_dynamic_rope, "rope_scaling of the type dynamic"), (with_experts, "not a mixture of experts")],
)
def test_an_unsupported_model_is_refused(
    change: Callable[[Path], None], expected: str, command: Command, model: Path
) -> None:
    change(model)
    assert command(f"/no/such/model -> {model}", device="cpu") is ExitCode.BAD_INPUT
    assert expected in command.printed


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import sys\nsys.exit(2)\n", "it called sys.exit(2)"),
        ("raise KeyboardInterrupt\n", "KeyboardInterrupt; correct that module"),
        ("def items():\n    raise ValueError('ab \\ud83d c')\n", "raised ValueError: ab \\ud83d c"),
    ],
)
def test_every_exception_of_a_task_is_bad_input_with_a_summary(
    source: str, message: str, command: Command, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "refused_items.py").write_text(f"{source}\ndef reward(answer, record):\n    return 0\n")
    command.output = OutputDirectory(tmp_path / "run\udcff")
    task = "name: digits -> name: refused_items:items, reward: refused_items:reward"
    assert command(task, f"/no/such/model -> {model}", device="cpu") is ExitCode.BAD_INPUT
    sys.modules.pop("refused_items", None)
    assert message in command.printed
    summary = json.loads(command.output.summary.read_bytes())
    assert (summary["exit_code"], summary["status"]) == (84, "Failed")
    assert message in command.exit_reason
    assert "run\\udcff/logs" in command.exit_reason


@pytest.mark.parametrize(
    ("committed", "status", "is_kept"),
    [(4, "Complete", True), (4, "Stopped", False), (20, "Complete", True)],
    ids=["refused", "stopped", "of more steps than the manifest"],
)
def test_the_summary_of_a_complete_run_is_kept(committed: int, status: str, is_kept: bool, command: Command) -> None:
    run = command.output
    with run.open(MANIFEST, identity(load_manifest(command.manifest))):
        write_ledger(run.path, [0.5] * committed)
        run.model.mkdir()
        run.summary.write_text(before := json.dumps({"status": status}))
    complete = committed > 8
    assert command(WRONG_ARGUMENT) is (ExitCode.COMPLETE if complete else ExitCode.BAD_INPUT)
    assert (run.summary.read_text() == before) is is_kept
    assert ("20 committed; algorithm.steps is 8" in command.printed) is complete


CHECKPOINT_BYTES, MODEL_BYTES = 10 * GIB, 2 * GIB


@pytest.mark.parametrize(
    ("free_gib", "kept", "last_step", "outcome"),
    [
        (32, 0, 0, ""),
        (31, 0, 0, "3 more checkpoints 10.00 GiB each. Free some space, or lower checkpoint.keep (2)"),
        (12, 2, 2, ""),  # the one that is written before an old one is removed
        (11, 0, 0, "the disk is full: "),
        (11, 2, 2, "the disk is full: "),
        (12, 0, 7, ""),
        (2, 2, 8, ""),  # only the model
        (1, 2, 8, "the disk is full: "),
    ],
)
def test_free_disk_is_compared_with_the_files_to_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_gib: int, kept: int, last_step: int, outcome: str
) -> None:
    spec = {"model": {"uri": "random://qwen3"}, "task": {"name": "digits"}, "algorithm": {"steps": 8}}
    job = RLJobSpec.model_validate(spec | {"checkpoint": {"everySteps": 1, "keep": 2}})
    directory = OutputDirectory(tmp_path)
    for step in range(kept):
        (directory.checkpoints / f"step-{step + 1:06d}").mkdir(parents=True)
    monkeypatch.setattr(attempt_plan, "free_bytes", lambda _path: free_gib * GIB)
    full = outcome.startswith("the disk is full")
    warnings: list[str] = []
    with pytest.raises(OutputUnavailable, match=outcome) if full else nullcontext():
        attempt_plan.require_free_disk(job, CHECKPOINT_BYTES, MODEL_BYTES, directory, last_step, warnings.append)
    assert [outcome in text for text in warnings] == [True] * bool(outcome and not full)


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, RunError | None]]:
    """For each attempt, the steps that it commits and the failure that ends it. The last one is repeated."""
    to_come: list[tuple[int, RunError | None]] = []

    def attempt(_run: JobRun, ledger: Ledger, *_: object) -> Outcome:
        steps, failure = to_come.pop(0) if len(to_come) > 1 else to_come[0]
        for _step in range(steps):
            ledger.commit(step_record(ledger.next_step))
        if failure is not None:
            raise failure
        return Outcome(ExitCode.COMPLETE, "complete", ledger.last_step)

    monkeypatch.setattr(JobRun, "_attempt", attempt)
    return to_come


LOST = WorkerLost("policy-0 died while updating").of("policy-0")
RAISED = RunError("policy-0 failed while updating: ValueError: no").of("policy-0")
GIVEN_UP = DeviceOutOfMemory("CUDA out of memory").of("policy-0")
GIVEN_UP.given_up = True


@pytest.mark.parametrize(
    ("failure", "restarts"),
    [
        (LOST, True),
        (RAISED, True),
        (BadInput("no such model").of("policy-0"), False),
        (OutputUnavailable("the disk is full"), False),
        (GIVEN_UP, False),
        (RunError("Ray did not start"), False),
    ],
)
def test_a_process_that_died_or_raised_is_restarted(
    failure: RunError, restarts: bool, command: Command, attempts: list[Any]
) -> None:
    attempts += [(0, failure), (8, None)]
    assert command() is (ExitCode.COMPLETE if restarts else failure.exit_code)


def test_half_of_the_remaining_steps_give_a_restart_back(command: Command, attempts: list[Any]) -> None:
    """A job of 8 steps never commits the 10 steps that restore a restart in a longer job."""
    attempts += [(4, LOST), (2, LOST), (1, LOST), (1, None)]
    assert command() is ExitCode.COMPLETE


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (RAISED, "the previous attempt failed with the same error"),
        (LOST, "all restarts are used, recovery.maxRestarts is 2"),
    ],
)
def test_a_run_that_is_given_up_reports_why(failure: RunError, why: str, command: Command, attempts: list[Any]) -> None:
    attempts += [(0, failure)]
    assert command("maxRestarts: 1 -> maxRestarts: 2") is failure.exit_code
    assert str(failure) in command.exit_reason
    assert why in command.exit_reason


def test_a_supervised_run_leaves_the_decision_to_its_supervisor(command: Command, attempts: list[Any]) -> None:
    attempts += [(0, RAISED)]
    supervision = Supervision(levels=frozenset({"Live", "RespawnRole"}))
    job, directory = load_manifest(command.manifest), command.output
    run = JobRun(job, directory.path, directory, LocalPlacement("cpu"), supervision=supervision, resume_hint="Wait.")
    with directory.open(MANIFEST, identity(job)):
        outcome = run.run()
    assert outcome.error is RAISED
    assert outcome.message == f"{RAISED}. Wait. Logs: {directory.logs}."


def test_only_a_lost_process_leaves_ray_for_the_next_attempt(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    runs = True
    monkeypatch.setenv("RLJOB_WARM_START", "none")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(shutdown=lambda: calls.append("stop")))
    monkeypatch.setattr(run_command, "start_local_ray", lambda **_arguments: calls.append("start"))
    monkeypatch.setattr(run_command, "local_ray_runs", lambda: runs)
    command.manifest.write_text(MANIFEST)
    placement, spec = LocalPlacement("cpu"), load_manifest(command.manifest).spec

    def attempt(failure: RunError, store_bytes: int = 1 << 30) -> list[str]:
        calls.clear()
        with suppress(RunError), placement:
            placement.known_hosts(spec)
            placement.start_ray(cast(RunDisplay, SimpleNamespace(phase=lambda _phase: None)), store_bytes)
            raise failure
        return calls

    assert attempt(LOST) == ["start"]
    assert attempt(LOST) == []
    assert attempt(LOST, store_bytes=2 << 30) == ["stop", "start"]
    assert attempt(PhaseDeadlineExceeded("policy-0 hangs"), store_bytes=2 << 30) == ["stop"]
    assert attempt(LOST) == ["start"]
    runs = False
    assert attempt(LOST) == ["stop", "start"], "one of its processes has ended"
    placement.close()
    assert calls == ["stop", "start", "stop"]


@pytest.mark.parametrize(("committed", "hint"), [(3, "To resume at step 4, run"), (8, "To write the model, run")])
def test_a_full_disk_names_the_next_command_once(
    committed: int, hint: str, command: Command, attempts: list[Any], tmp_path: Path
) -> None:
    attempts += [(committed, OutputUnavailable(disk_full_message(tmp_path, 100)))]
    assert command() is ExitCode.OUTPUT_UNAVAILABLE
    assert f"Free some space. {hint} the same command again. Logs: " in command.exit_reason
    assert command.exit_reason.count("the same command") == 1


def test_an_interrupt_without_a_signal_is_an_error(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_attempt: Attempt) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Attempt, "run", interrupted)
    assert command(device="cpu") is ExitCode.ERROR
    assert "unexpected KeyboardInterrupt" in command.printed
