"""The help and the version of `rljob`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rljob_client.cli import app


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("command", ["run", "validate", "fetch", "plot", "diagnose"])
def test_help_of_each_command_has_examples(command: str) -> None:
    help_text = printed(command, "-h")
    assert f"rljob {command} " in help_text.partition("Examples:")[2]
    assert help_text == printed(command, "--help")


def test_version_lists_the_facts_for_a_bug_report() -> None:
    names = [line.split()[0] for line in printed("--version").splitlines()]
    assert names[0] == "rljob-trainer"
    assert {"torch", "ray", "python"} < set(names)


def test_a_locale_without_a_character_of_a_message_prints_it_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("slurmstepd: error: Detected 1 oom_kill event in StepId=4711.batch.\n")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "rljob_client", "diagnose", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **ascii_only}, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert "Raise the limit of host memory" in done.stdout.decode("utf-8")


def test_a_deleted_working_directory_is_refused(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f"cd {gone} && rmdir {gone} && {sys.executable} -m rljob_client --version"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "expected a working directory, found none" in done.stderr


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("export", "rljob fetch JOB"),
        ("train", "Run rljob run MANIFEST"),
        ("launch", "Run kubectl apply -f MANIFEST"),
        ("submit", "Run kubectl apply -f MANIFEST"),
        ("logs", "Run kubectl logs JOB-controller"),
        ("status", "Run kubectl get rlj JOB"),
        ("serve", "Run vllm serve DIR/model"),
        ("evaluate", "Evaluation is not supported yet"),
        ("valdiate", "Did you mean 'validate'?"),
    ],
)
def test_a_command_of_other_programs_is_answered(name: str, instead: str) -> None:
    result = CliRunner().invoke(app, [name, "job.yaml"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 2
    assert instead in " ".join(result.output.split())
