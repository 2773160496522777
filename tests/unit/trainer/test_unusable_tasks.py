"""Jobs whose task cannot be used end with a summary, whatever the locale and the working directory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_trainer.models.random_model import resolve
from rljob_trainer.runtime.attempt import Attempt
from rljob_trainer.runtime.run_command import RunOptions, run_manifest

MANIFEST = """
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: refused}
spec:
  model: {uri: "file:///no/such/model"}
  task: {name: digits}
  algorithm: {steps: 8}
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return shutil.copytree(resolve("qwen3?hidden=32&layers=1", tmp_path), tmp_path / "model")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import sys\nsys.exit(2)\n", "it called sys.exit(2)"),
        ("raise KeyboardInterrupt\n", "KeyboardInterrupt; correct that module"),
        ("def items():\n    raise KeyboardInterrupt\n", "raised KeyboardInterrupt"),
        ("def items():\n    raise ValueError('ab \\ud83d c')\n", "raised ValueError: ab \\ud83d c"),
        ("def items():\n    return [{'prompt': '\\ud83d'}]\n", "found half of a character in '\\ud83d'"),
    ],
)
def test_whatever_the_task_raises_is_bad_input_with_a_summary(
    source: str, message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "refused_items.py").write_text(f"{source}\ndef reward(answer, record):\n    return 0\n")
    manifest = tmp_path / "job.yaml"
    task = "task: {name: refused_items:items, reward: refused_items:reward}"
    manifest.write_text(
        MANIFEST.replace("/no/such/model", str(model))
        .replace("task: {name: digits}", task)
    )  # fmt: skip
    assert run_manifest(manifest, RunOptions(output=tmp_path / "run\udcff", device="cpu")) is ExitCode.BAD_INPUT
    sys.modules.pop("refused_items", None)
    assert message in " ".join(capsys.readouterr().out.split())
    summary = json.loads((tmp_path / "run\udcff" / "summary.json").read_bytes())
    assert (summary["exit_code"], summary["status"]) == (84, "Failed")
    assert message in summary["exit_reason"]
    assert "run\\udcff/logs" in summary["exit_reason"]


def test_an_interrupt_without_a_signal_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_attempt: Attempt) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Attempt, "run", interrupted)
    manifest = tmp_path / "job.yaml"
    manifest.write_text(MANIFEST)
    assert run_manifest(manifest, RunOptions(output=tmp_path / "run", device="cpu")) is ExitCode.ERROR
    assert "unexpected KeyboardInterrupt" in capsys.readouterr().out


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
