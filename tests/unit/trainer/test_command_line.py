"""The help and the version of `rljob`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize("locale", ["C", "C.UTF-8", "de_DE.ISO-8859-1"])
def test_neither_the_locale_nor_the_working_directory_changes_a_command(locale: str, tmp_path: Path) -> None:
    (tmp_path / "numbers.py").write_text("raise SystemError('it shadows another module')\n", encoding="utf-8")
    (tmp_path / "jöb.yaml").write_text("apiVersion: rljob.dev/v1alpha1\nkind: Jöb\n", encoding="utf-8")
    variables = {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "rljob_trainer", "validate", "--schema-only", "jöb.yaml", "-"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | variables, input=b"kind: J\xf6b", capture_output=True, check=False
    )
    printed = done.stderr.decode("utf-8")
    assert done.returncode == 2, printed
    assert "jöb.yaml:2: kind: expected RLJob, found 'Jöb'" in printed
    assert "stdin: is not YAML" in printed
    assert "Traceback" not in printed
