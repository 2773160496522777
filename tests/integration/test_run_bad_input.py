"""Errors in a job are reported before any process starts: expected, found, what to do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rljob_api.exit_codes import ExitCode
from rljob_testing.runs import FinishedRun, rljob_run, write_manifest
from rljob_trainer.models.random_model import resolve

JSONL = {"name": "jsonl", "args": {"path": "prompts.jsonl"}, "reward": "rewards:constant"}


def write_task(directory: Path) -> Path:
    """The files of a job on a user's own prompts and reward."""
    (directory / "prompts.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "2+2="}\n')
    (directory / "rewards.py").write_text(
        "def constant(answer, record):\n    return 0.5\n"
        "def sometimes(answer, record):\n    return 1 / 0 if 'hard' in record and len(answer) >= 4 else 0.5\n"
        "def not_a_number(answer, record):\n    return float('nan')\n"
    )
    return directory


def run_expecting(code: ExitCode, directory: Path, *expected: str, **changes: dict[str, Any]) -> None:
    run = rljob_run(write_manifest(directory / "job.yaml", **changes), directory / "run")
    assert run.exit_code == code, run.printed
    for text in expected:
        assert text in run.printed.replace("\n", " "), run.printed
    assert "starting Ray" not in run.printed


def test_a_manifest_is_corrected_in_the_same_directory(tmp_path: Path) -> None:
    write_task(tmp_path)
    wrong = {"groupSise": 4, "learningRate": -1, "steps": "many"}
    expected = ("spec.algorithm.groupSise", "groupSize", "spec.algorithm.learningRate", "spec.algorithm.steps")
    run_expecting(ExitCode.INVALID_MANIFEST, tmp_path, *expected, algorithm=wrong)
    assert not (tmp_path / "run").exists()
    run_expecting(ExitCode.BAD_INPUT, tmp_path, "/nowhere", model={"uri": "file:///nowhere/model"})
    absent = JSONL | {"reward": "rewards:absent"}
    run_expecting(ExitCode.BAD_INPUT, tmp_path, "expected a function absent", task=absent)
    not_a_number = JSONL | {"reward": "rewards:not_a_number"}
    run_expecting(ExitCode.BAD_INPUT, tmp_path, "rewards:not_a_number", "returned nan", task=not_a_number)
    (tmp_path / "prompts.jsonl").write_text("\n")
    run_expecting(ExitCode.BAD_INPUT, tmp_path, "expected at least one item", task=JSONL)


def test_a_model_whose_log_probabilities_are_not_finite_is_refused(tmp_path: Path) -> None:
    source = resolve("qwen3?hidden=64&layers=2&initializerRange=0.1", tmp_path / "cache", lambda _directory: None)
    model = shutil.copytree(source, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] *= np.float32(1e38)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    run = rljob_run(write_manifest(tmp_path / "job.yaml", model={"uri": f"file://{model}"}), tmp_path / "run")
    assert run.exit_code == ExitCode.BAD_INPUT, run.printed
    assert "expected finite log-probabilities in the first step, found" in run.printed
    assert run.steps == []


def job_on_sums(steps: int, **task: Any) -> dict[str, dict[str, Any]]:
    """A job that skips prompts of more than four tokens."""
    task = JSONL | {"reward": "rewards:sometimes", "overlongPrompts": "Skip"} | task
    algorithm = {"steps": steps, "maxPromptTokens": 4, "ignoreEndOfSequence": False, "entropyCoefficient": 0.0}
    return {"task": task, "algorithm": algorithm, "checkpoint": {"acceptChangedInputs": "onRewardError" in task}}


@pytest.fixture(scope="module")
def equally_rewarded(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Two steps in which all rewards are equal. One prompt is too long."""
    directory = write_task(tmp_path_factory.mktemp("sums"))
    with (directory / "prompts.jsonl").open("a") as prompts:
        prompts.write('{"prompt": "20+20="}\n')
    return rljob_run(write_manifest(directory / "job.yaml", **job_on_sums(steps=2)), directory / "run")


@pytest.fixture(scope="module")
def harder(equally_rewarded: FinishedRun) -> Path:
    """The directory of that job, with a further prompt, on whose long answers the reward fails."""
    assert equally_rewarded.exit_code == ExitCode.COMPLETE, equally_rewarded.printed
    directory = equally_rewarded.output.parent
    with (directory / "prompts.jsonl").open("a") as prompts:
        prompts.write('{"prompt": "3+3=", "hard": true}\n')
    return directory


@pytest.fixture(scope="module")
def failed(harder: Path) -> FinishedRun:
    """The same job, resumed with the changed prompts."""
    manifest = write_manifest(harder / "job.yaml", **job_on_sums(steps=4, onRewardError="Fail"))
    return rljob_run(manifest, harder / "run")


@pytest.fixture(scope="module")
def counted_as_zero(failed: FinishedRun) -> FinishedRun:
    """The same job, which counts failed rewards as zero."""
    directory = failed.output.parent
    manifest = write_manifest(directory / "job.yaml", **job_on_sums(steps=4, onRewardError="Zero"))
    return rljob_run(manifest, failed.output)


def test_equal_rewards_teach_nothing_and_long_prompts_are_skipped(equally_rewarded: FinishedRun) -> None:
    run = equally_rewarded
    assert run.exit_code == ExitCode.COMPLETE, run.printed
    assert [step["metrics"]["uniform_groups"] for step in run.steps[:2]] == [1.0, 1.0]
    assert [step["metrics"]["grad_norm"] for step in run.steps[:2]] == [0.0, 0.0]
    assert "warning: step 2: the responses to each prompt have equal rewards" in run.printed
    assert run.summary["steps_without_gradient"] == 2
    assert "Skipping 1 of 3 prompts" in run.printed
    assert run.summary["skipped_prompts"] == 1


def test_changed_data_are_refused_after_a_step(harder: Path) -> None:
    expected = ("has committed 2 steps, found others: data (3 items, now 4)", "checkpoint.acceptChangedInputs: true")
    run_expecting(ExitCode.BAD_INPUT, harder, *expected, **job_on_sums(steps=4))


def test_a_reward_that_fails_ends_a_job_that_accepted_changed_data(failed: FinishedRun) -> None:
    assert "Resuming with changed inputs: data (3 items, now 4)" in failed.printed, failed.printed
    assert failed.exit_code == ExitCode.BAD_INPUT, failed.printed
    for text in ("raised ZeroDivisionError", "of the task jsonl", "line 4, in sometimes", "task.onRewardError: Zero"):
        assert text in failed.printed, failed.printed


def test_failed_rewards_count_as_zero_and_more_steps_train_on(counted_as_zero: FinishedRun) -> None:
    run = counted_as_zero
    assert run.exit_code == ExitCode.COMPLETE, run.printed
    assert "rewards are 0, since the reward function rewards:sometimes raised ZeroDivisionError" in run.printed
    assert [step["step"] for step in run.steps] == [1, 2, 3, 4]
    errors = [step["metrics"]["reward_errors"] for step in run.steps]
    assert errors[:2] == [0, 0]
    assert min(errors[2:]) > 0
    assert run.summary["reward_errors"] == sum(errors)
    assert [attempt["inputs"]["data"]["items"] for attempt in run.attempts] == [3, 4, 4]
