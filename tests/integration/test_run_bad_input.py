"""Errors in a job are reported before any process starts: expected, found, what to do."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rljob_api.exit_codes import ExitCode
from rljob_testing.patience import wait_for_end
from rljob_testing.repository import ROOT
from rljob_testing.runs import Run, rljob_run, start_rljob, write_manifest
from rljob_trainer.models.random_model import resolve

JSONL = {"name": "jsonl", "args": {"path": "prompts.jsonl"}, "reward": "rewards:constant"}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A directory with a job on a user's own prompts and reward."""
    return write_task(tmp_path)


def write_task(directory: Path) -> Path:
    (directory / "prompts.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "2+2="}\n')
    (directory / "rewards.py").write_text(
        "def constant(answer, record):\n    return 0.5\n"
        "def raising(answer, record):\n    raise KeyError('no such thing')\n"
        "def sometimes(answer, record):\n    return 1 / 0 if 'hard' in record and len(answer) >= 4 else 0.5\n"
        "def not_a_number(answer, record):\n    return float('nan')\n"
    )
    return directory


def run_expecting(code: ExitCode, directory: Path, *said: str, **changes: dict[str, Any]) -> Run:
    run = rljob_run(write_manifest(directory / "job.yaml", **changes), directory / "run")
    assert run.exit_code == code, run.printed
    for words in said:
        assert words in run.printed.replace("\n", " "), run.printed
    assert "starting Ray" not in run.printed
    return run


def test_a_wrong_manifest_names_every_problem_with_its_path(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "job.yaml", algorithm={"groupSise": 4, "learningRate": -1, "steps": "many"})
    run = rljob_run(manifest, tmp_path / "run")
    assert run.exit_code == ExitCode.INVALID_MANIFEST
    for words in ("spec.algorithm.groupSise", "groupSize", "spec.algorithm.learningRate", "spec.algorithm.steps"):
        assert words in run.printed
    assert not (tmp_path / "run").exists()


def test_validate_names_the_same_problems(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "job.yaml", algorithm={"groupSize": 1})
    process = start_rljob("validate", manifest, ROOT / "examples" / "digits.yaml")
    printed = wait_for_end(process)
    assert process.returncode == ExitCode.INVALID_MANIFEST
    assert "spec.algorithm.groupSize" in printed
    assert "digits.yaml: valid" in printed


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    run_expecting(ExitCode.BAD_INPUT, tmp_path, "/nowhere", model={"uri": "file:///nowhere/model"})


def test_sequences_longer_than_the_model_can_take(tmp_path: Path) -> None:
    said = ("to be at most 4096", "found 4108")
    run_expecting(ExitCode.BAD_INPUT, tmp_path, *said, algorithm={"maxResponseTokens": 4100})


def test_adapters_that_the_model_cannot_have(tmp_path: Path) -> None:
    said = ("policy.lora.targets: expected names of linear layers", "found query", "q_proj, up_proj")
    run_expecting(ExitCode.BAD_INPUT, tmp_path, *said, policy={"lora": {"targets": ["query"]}})


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (
            lambda weights: np.full_like(weights, np.nan),
            "found NaN or infinity in model.layers.0.mlp.up_proj.weight of",
        ),
        (lambda weights: weights * np.float32(1e38), "expected finite log-probabilities in the first step, found"),
    ],
    ids=["nan", "overflow"],
)
def test_a_model_whose_numbers_are_not_finite(tmp_path: Path, broken: Callable[[Any], Any], said: str) -> None:
    source = resolve("qwen3?hidden=64&layers=2&initializerRange=0.1", tmp_path / "cache", lambda _directory: None)
    model = shutil.copytree(source, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = broken(tensors["model.layers.0.mlp.up_proj.weight"])
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    run = rljob_run(write_manifest(tmp_path / "job.yaml", model={"uri": f"file://{model}"}), tmp_path / "run")
    assert run.exit_code == ExitCode.BAD_INPUT, run.printed
    assert said in run.printed
    assert run.steps == []


def test_a_task_without_items(job: Path) -> None:
    (job / "prompts.jsonl").write_text("\n")
    run_expecting(ExitCode.BAD_INPUT, job, "expected at least one item", task=JSONL)


def test_a_prompt_longer_than_the_limit(job: Path) -> None:
    (job / "prompts.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "20+20="}\n')
    said = ("found 6 in prompt 1", "Write algorithm.maxPromptTokens: 6, or task.overlongPrompts: Skip")
    run_expecting(ExitCode.BAD_INPUT, job, *said, task=JSONL, algorithm={"maxPromptTokens": 4})


@pytest.mark.parametrize(
    ("function", "said"), [("raising", "raised KeyError: 'no such thing'"), ("not_a_number", "returned nan")]
)
def test_a_reward_function_that_gives_no_number(job: Path, function: str, said: str) -> None:
    run_expecting(ExitCode.BAD_INPUT, job, f"rewards:{function}", said, task=JSONL | {"reward": f"rewards:{function}"})


def job_on_sums(steps: int, **task: Any) -> dict[str, dict[str, Any]]:
    """A job that skips prompts of more than four tokens."""
    task = JSONL | {"reward": "rewards:sometimes", "overlongPrompts": "Skip"} | task
    algorithm = {"steps": steps, "maxPromptTokens": 4, "ignoreEndOfSequence": False, "entropyCoefficient": 0.0}
    return {"task": task, "algorithm": algorithm, "checkpoint": {"acceptChangedInputs": "onRewardError" in task}}


@pytest.fixture(scope="module")
def equally_rewarded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps in which all rewards are equal. One prompt is too long."""
    directory = write_task(tmp_path_factory.mktemp("sums"))
    with (directory / "prompts.jsonl").open("a") as prompts:
        prompts.write('{"prompt": "20+20="}\n')
    return rljob_run(write_manifest(directory / "job.yaml", **job_on_sums(steps=2)), directory / "run")


@pytest.fixture(scope="module")
def harder(equally_rewarded: Run) -> Path:
    """The directory of that job, with a further prompt, on whose long answers the reward fails."""
    assert equally_rewarded.exit_code == ExitCode.COMPLETE, equally_rewarded.printed
    directory = equally_rewarded.output.parent
    with (directory / "prompts.jsonl").open("a") as prompts:
        prompts.write('{"prompt": "3+3=", "hard": true}\n')
    return directory


@pytest.fixture(scope="module")
def failed(harder: Path) -> Run:
    """The same job, resumed with the changed prompts."""
    manifest = write_manifest(harder / "job.yaml", **job_on_sums(steps=4, onRewardError="Fail"))
    return rljob_run(manifest, harder / "run")


@pytest.fixture(scope="module")
def counted_as_zero(failed: Run) -> Run:
    """The same job, which counts failed rewards as zero."""
    directory = failed.output.parent
    manifest = write_manifest(directory / "job.yaml", **job_on_sums(steps=4, onRewardError="Zero"))
    return rljob_run(manifest, failed.output)


def test_rewards_that_are_all_equal_teach_nothing_and_break_nothing(equally_rewarded: Run) -> None:
    run = equally_rewarded
    assert run.exit_code == ExitCode.COMPLETE, run.printed
    assert [step["metrics"]["uniform_groups"] for step in run.steps[:2]] == [1.0, 1.0]
    assert [step["metrics"]["grad_norm"] for step in run.steps[:2]] == [0.0, 0.0]
    assert "warning: step 2: the responses to each prompt have equal rewards" in run.printed
    assert run.summary["steps_without_gradient"] == 2


def test_prompts_longer_than_the_limit_are_skipped_and_counted(equally_rewarded: Run) -> None:
    assert "Skipping 1 of 3 prompts" in equally_rewarded.printed
    assert equally_rewarded.summary["skipped_prompts"] == 1


def test_changed_data_are_refused_after_a_step(harder: Path) -> None:
    said = ("has committed 2 steps, found others: data (3 items, now 4)", "checkpoint.acceptChangedInputs: true")
    run_expecting(ExitCode.BAD_INPUT, harder, *said, **job_on_sums(steps=4))


def test_a_reward_that_fails_ends_a_job_that_accepted_changed_data(failed: Run) -> None:
    assert "Resuming with changed inputs: data (3 items, now 4)" in failed.printed, failed.printed
    assert failed.exit_code == ExitCode.BAD_INPUT, failed.printed
    for words in ("raised ZeroDivisionError", "of the task jsonl", "line 6, in sometimes", "task.onRewardError: Zero"):
        assert words in failed.printed, failed.printed


def test_failed_rewards_count_as_zero_and_more_steps_train_on(counted_as_zero: Run) -> None:
    run = counted_as_zero
    assert run.exit_code == ExitCode.COMPLETE, run.printed
    assert "rewards are 0, since the reward function rewards:sometimes raised ZeroDivisionError" in run.printed
    assert [step["step"] for step in run.steps] == [1, 2, 3, 4]
    errors = [step["metrics"]["reward_errors"] for step in run.steps]
    assert errors[:2] == [0, 0]
    assert min(errors[2:]) > 0
    assert run.summary["reward_errors"] == sum(errors)
    assert [attempt["inputs"]["data"]["items"] for attempt in run.attempts] == [3, 4, 4]


def test_a_corrected_manifest_runs_in_the_same_directory(job: Path) -> None:
    run_expecting(ExitCode.BAD_INPUT, job, "expected a function absent", task=JSONL | {"reward": "rewards:absent"})
    run_expecting(ExitCode.BAD_INPUT, job, "raised KeyError", task=JSONL | {"reward": "rewards:raising"})


def test_a_second_run_in_the_same_directory_refuses(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run_expecting(ExitCode.OUTPUT_UNAVAILABLE, tmp_path, "is in use by another run", "--output")
