"""The help and the version of `rljob`."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from rljob_trainer.cli import app


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
