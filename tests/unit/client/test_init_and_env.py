"""`rljob init`, `rljob env`, `validate --json`, `--quiet` and shell completion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rljob_api.manifest import load_manifest
from rljob_client.cli import app
from rljob_client.env_command import shown_variables
from rljob_testing.repository import EXAMPLES

TINY = EXAMPLES / "digits.yaml"


def rljob(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], {"name": "digits", "task": "digits", "gpus": (1, 1)}),
        (["--gpus", "16", "--task", "chain_sum"], {"name": "chain-sum", "task": "reasoning-gym", "gpus": (2, 8)}),
        (["--gpus", "0"], {"name": "digits", "task": "digits", "gpus": (1, 0)}),
        (
            ["--task", "data/My prompts.jsonl", "--reward", "rewards:score", "--model", "hf://Qwen/Qwen3-0.6B"],
            {"name": "my-prompts", "task": "jsonl", "gpus": (1, 1)},
        ),
        (
            [
                "--task",
                "openai/gsm8k",
                "--reward",
                "rewards:score",
                "--set",
                "task.args.name=main",
                "--algorithm",
                "gspo",
            ],
            {"name": "gsm8k", "task": "dataset", "gpus": (1, 1)},
        ),
        (
            ["--task", "tasks:items", "--reward", "tasks:score", "--set", "algorithm.groupSize=4"],
            {"name": "tasks", "task": "tasks:items", "gpus": (1, 1)},
        ),
    ],
)
def test_the_written_manifest_is_valid_and_explains_its_fields(
    options: list[str], expected: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "new" / "job.yaml"
    result = rljob("init", path, *options)
    assert result.exit_code == 0, result.output
    job = load_manifest(path)
    policy = job.spec.policy
    found = {"name": job.metadata.name, "task": job.spec.task.name, "gpus": (policy.replicas, policy.gpus_per_replica)}
    assert found == expected
    lines = path.read_text().splitlines()
    assert any(line.strip().startswith("# Number of steps.") for line in lines)
    assert max(map(len, lines)) <= 120
    assert rljob("validate", "--schema-only", path).exit_code == 0


def test_the_default_manifest_passes_validate(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    rljob("init", path)
    result = rljob("validate", "--strict", path)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--model", "Qwen/Qwen3-0.6B"], "rljob init: --model: expected"),
        (["--task", "prompts.jsonl"], "--reward"),
        (["--steps", "0"], "rljob init: --steps: expected a whole number from 1"),
        (["--algorithm", "grop"], "rljob init: --algorithm: expected"),
        (["--gpus", "-1"], "rljob init: --gpus: expected"),
        (["--set", "algorithm.stpes=3"], "rljob init: --set algorithm.stpes=3: unknown field; did you mean steps?"),
    ],
)
def test_an_invalid_choice_is_named_and_nothing_is_written(options: list[str], expected: str, tmp_path: Path) -> None:
    result = rljob("init", tmp_path / "job.yaml", *options)
    assert result.exit_code == 2
    assert expected in result.stderr
    assert not list(tmp_path.iterdir())


def test_an_existing_manifest_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("mine")
    result = rljob("init", path)
    assert (result.exit_code, path.read_text()) == (2, "mine")
    assert "found one; name another, or use --force" in result.stderr
    assert rljob("init", path, "--force").exit_code == 0
    assert load_manifest(path).metadata.name == "digits"


def test_the_environment_shows_no_secret() -> None:
    shown = shown_variables(
        {
            "HF_TOKEN": "hf_secret",
            "RAY_AUTH_TOKEN": "ray_secret",
            "VLLM_API_KEY": "vllm_secret",
            "AWS_SECRET_ACCESS_KEY": "aws_secret",
            "HF_ENDPOINT": "https://me:pass_secret@hub.example",
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "HOME": "/root",
        }
    )
    assert "secret" not in str(list(shown.values()))
    assert shown["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert shown["HF_ENDPOINT"] == "https://(not shown)@hub.example"
    assert set(shown) == {"HF_TOKEN", "RAY_AUTH_TOKEN", "VLLM_API_KEY", "HF_ENDPOINT", "PYTORCH_CUDA_ALLOC_CONF"}


def test_the_environment_has_what_a_bug_report_needs(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, NVIDIA H200, 143771 MiB, 580.82.07, 9.0, Disabled'\n")
    program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    result = CliRunner().invoke(app, ["env", "--json"], env={"PATH": path})
    facts = json.loads(result.stdout)
    assert facts["gpus"] == {"0": "NVIDIA H200, 143771 MiB, 580.82.07, 9.0, Disabled"}
    assert {"torch", "ray", "rljob-client", "python"} <= set(facts["packages"])
    assert {"platform", "host memory", "/dev/shm"} <= set(facts["system"])
    program.write_text("#!/bin/sh\necho 'NVML: driver/library version mismatch'; exit 18\n")
    text = CliRunner().invoke(app, ["env"], env={"PATH": path}).stdout
    assert "driver/library version mismatch" in text


def test_findings_are_printed_as_json(tmp_path: Path) -> None:
    wrong = tmp_path / "job.yaml"
    wrong.write_text(TINY.read_text().replace("steps: 60", "steps: 0"))
    result = rljob("validate", "--json", "--schema-only", TINY, wrong, "--set", "algorithm.groupSize=x")
    assert result.exit_code == 2
    found = json.loads(result.stdout)
    assert found["valid"] is False
    by_file = [(Path(each["file"]).name, each["path"], each["setting"]) for each in found["findings"]]
    assert by_file == [
        ("digits.yaml", "spec.algorithm.groupSize", "algorithm.groupSize=x"),
        ("job.yaml", "spec.algorithm.steps", None),
        ("job.yaml", "spec.algorithm.groupSize", "algorithm.groupSize=x"),
    ] or by_file == [
        ("digits.yaml", "spec.algorithm.groupSize", "algorithm.groupSize=x"),
        ("job.yaml", "spec.algorithm.groupSize", "algorithm.groupSize=x"),
        ("job.yaml", "spec.algorithm.steps", None),
    ]
    assert result.stderr == ""
    assert json.loads(rljob("validate", "--json", "--schema-only", TINY).stdout) == {"valid": True, "findings": []}


def test_quiet_prints_problems_only(tmp_path: Path) -> None:
    assert rljob("validate", "--quiet", "--schema-only", TINY).output == ""
    result = rljob("validate", "-q", "--schema-only", TINY, "--set", "algorithm.steps=0")
    assert (result.stdout, result.stderr.count("\n")) == ("", 1)


def test_a_plan_follows_the_settings() -> None:
    result = rljob("plan", TINY, "--json", "--set", "algorithm.promptsPerStep=0")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--set algorithm.promptsPerStep=0: spec.algorithm.promptsPerStep: expected a whole number" in result.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [("rljob rep", "report"), ("rljob validate --sch", "--schema-only"), ("rljob run --dry", "--dry-run")],
)
def test_the_shell_completes_commands_and_options(words: str, expected: str) -> None:
    program = "import sys; sys.argv[0] = 'rljob'; from rljob_client.__main__ import main; main()"
    variables = {"_RLJOB_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == [expected], done.stderr
