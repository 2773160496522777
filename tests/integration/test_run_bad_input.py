"""What is wrong with a job is said before any process is started: what was expected, what was found, what to do."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_api.exit_codes import ExitCode
from rljob_testing.repository import ROOT
from rljob_testing.runs import Run, rljob_run, start_rljob, write_manifest

JSONL = {"name": "jsonl", "args": {"path": "prompts.jsonl"}, "reward": "rewards:constant"}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A directory with a job on a user's own prompts and reward."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "2+2="}\n')
    (tmp_path / "rewards.py").write_text(
        "def constant(answer, record):\n    return 0.5\n"
        "def raising(answer, record):\n    raise KeyError('no such thing')\n"
        "def not_a_number(answer, record):\n    return float('nan')\n"
    )
    return tmp_path


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
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INVALID_MANIFEST
    assert "spec.algorithm.groupSize" in printed
    assert "digits.yaml: valid" in printed


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    run_expecting(ExitCode.BAD_INPUT, tmp_path, "/nowhere", model={"uri": "file:///nowhere/model"})


def test_sequences_longer_than_the_model_can_take(tmp_path: Path) -> None:
    said = ("to be at most 4096", "found 4108")
    run_expecting(ExitCode.BAD_INPUT, tmp_path, *said, algorithm={"maxResponseTokens": 4100})


def test_a_task_without_items(job: Path) -> None:
    (job / "prompts.jsonl").write_text("\n")
    run_expecting(ExitCode.BAD_INPUT, job, "expected at least one item", task=JSONL)


def test_a_prompt_longer_than_the_limit(job: Path) -> None:
    (job / "prompts.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "20+20="}\n')
    said = ("found 6 in prompt 1", "Write algorithm.maxPromptTokens: 6, or task.overlongPrompts: Skip")
    run_expecting(ExitCode.BAD_INPUT, job, *said, task=JSONL, algorithm={"maxPromptTokens": 4})


def test_prompts_longer_than_the_limit_are_skipped_and_counted(job: Path) -> None:
    (job / "prompts.jsonl").write_text('{"prompt": "20+20="}\n{"prompt": "1+1="}\n')
    changes = {"task": JSONL | {"overlongPrompts": "Skip"}, "algorithm": {"steps": 1, "maxPromptTokens": 4}}
    run = rljob_run(write_manifest(job / "job.yaml", **changes), job / "run")
    assert run.exit_code == ExitCode.COMPLETE, run.printed
    assert "Skipping 1 of 2 prompts" in run.printed
    assert json.loads((run.output / "summary.json").read_bytes())["skipped_prompts"] == 1


@pytest.mark.parametrize(
    ("function", "said"), [("raising", "raised KeyError: 'no such thing'"), ("not_a_number", "found nan")]
)
def test_a_reward_function_that_gives_no_number(job: Path, function: str, said: str) -> None:
    run_expecting(ExitCode.BAD_INPUT, job, f"rewards:{function}", said, task=JSONL | {"reward": f"rewards:{function}"})


def test_a_corrected_manifest_runs_in_the_same_directory(job: Path) -> None:
    run_expecting(ExitCode.BAD_INPUT, job, "expected a function absent", task=JSONL | {"reward": "rewards:absent"})
    run_expecting(ExitCode.BAD_INPUT, job, "raised KeyError", task=JSONL | {"reward": "rewards:raising"})


def test_a_topology_that_one_machine_cannot_have(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "job.yaml")
    spec = yaml.safe_load(manifest.read_text())
    spec["spec"]["topology"] = "Disaggregated"
    manifest.write_text(yaml.safe_dump(spec))
    run = rljob_run(manifest, tmp_path / "run")
    assert run.exit_code == ExitCode.BAD_INPUT
    assert "topology: Colocated" in run.printed


def test_a_second_run_in_the_same_directory_refuses(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run_expecting(ExitCode.OUTPUT_UNAVAILABLE, tmp_path, "is in use by another run", "--output")


def test_rewards_that_are_all_equal_teach_nothing_and_break_nothing(job: Path) -> None:
    changes = {"task": JSONL, "algorithm": {"steps": 2, "ignoreEndOfSequence": False, "entropyCoefficient": 0.0}}
    run = rljob_run(write_manifest(job / "job.yaml", **changes), job / "run")
    assert run.exit_code == ExitCode.COMPLETE, run.printed
    assert [step["metrics"]["uniform_groups"] for step in run.steps] == [1.0, 1.0]
    assert [step["metrics"]["grad_norm"] for step in run.steps] == [0.0, 0.0]
