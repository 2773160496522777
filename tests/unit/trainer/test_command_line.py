"""The command `rljob` as a program, and the imports of the controller."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rljob_client.cli import app
from rljob_testing.patience import PATIENCE_SECONDS


def invoked(*arguments: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == exit_code, result.output
    return result.output


@pytest.mark.parametrize("command", ["run", "validate", "plan", "report", "init", "env", "fetch", "diagnose"])
def test_help_of_each_command_has_examples(command: str) -> None:
    help_text = invoked(command, "-h")
    assert f"rljob {command} " in help_text.partition("Examples:")[2]
    assert help_text == invoked(command, "--help")


def test_version_lists_the_facts_for_a_bug_report() -> None:
    names = [line.split()[0] for line in invoked("--version").splitlines()]
    assert names[0] == "rljob-trainer"
    assert {"torch", "ray", "python"} < set(names)


@pytest.mark.parametrize("locale", ["C", "C.UTF-8", "de_DE.ISO-8859-1"])
def test_neither_the_locale_nor_the_working_directory_changes_a_command(locale: str, tmp_path: Path) -> None:
    (tmp_path / "numbers.py").write_text("raise SystemError('it shadows another module')\n", encoding="utf-8")
    (tmp_path / "jöb.yaml").write_text("apiVersion: rljob.dev/v1alpha1\nkind: Jöb\n", encoding="utf-8")
    variables = {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "rljob_client", "validate", "--schema-only", "jöb.yaml", "-"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | variables, input=b"kind: J\xf6b", capture_output=True, check=False
    )
    printed = done.stderr.decode("utf-8")
    assert done.returncode == 2, printed
    assert "jöb.yaml:2: kind: expected RLJob, found 'Jöb'" in printed
    assert "stdin:1: expected UTF-8 text" in printed
    assert "Traceback" not in printed


def test_output_is_printed_in_a_locale_that_lacks_its_characters(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("slurmstepd: error: Detected 1 oom_kill event in StepId=4711.batch.\n")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "rljob_client", "diagnose", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **ascii_only}, capture_output=True, check=True)
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
        ("push", "Run rljob export DIR --push-to-hub"),
        ("train", "Run rljob run MANIFEST"),
        ("launch", "Run kubectl apply -f MANIFEST"),
        ("submit", "Run kubectl apply -f MANIFEST"),
        ("logs", "Run kubectl rljob logs JOB"),
        ("status", "Run kubectl rljob status JOB"),
        ("serve", "Run vllm serve DIR/model"),
        ("evaluate", "Write spec.evaluation"),
        ("plot", "Run rljob report DIR"),
        ("valdiate", "Did you mean 'validate'?"),
    ],
)
def test_a_command_of_other_programs_is_answered(name: str, instead: str) -> None:
    assert instead in " ".join(invoked(name, "job.yaml", exit_code=2).split())


_PROGRAM = """
import sys
from pathlib import Path
import rljob_trainer.pods.controller_pod
import rljob_trainer.runtime.run_command
from rljob_api.manifest import load_manifest
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.models.checkpoint import load_tokenizer
from rljob_trainer.tasks.build import build_task

job = load_manifest(Path("examples/digits.yaml"))
model = resolve_model(job.spec.model.uri, Path(sys.argv[1]))
build_task(job.spec.task, load_tokenizer(model), 8, Path("."), 0).prompts(1, 8)
print([name for name in ("torch", "vllm", "ray") if name in sys.modules])
"""


def test_the_controller_imports_neither_torch_nor_vllm(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.stdout.strip() == "[]", done.stdout
