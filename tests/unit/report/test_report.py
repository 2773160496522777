"""The report of a run: its contents, and directories without a run."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rljob_client.cli import app
from rljob_client.errors import OutputUnavailable
from rljob_client.report import write_report
from rljob_client.run_directory.ledger import Ledger
from tests.unit.ledger.samples import write_ledger
from tests.unit.report.runs import HOSTILE, MANIFEST, write_run


def text_of(report: Path) -> str:
    """The visible text. The script of plotly.js, and the figures, are left out."""
    page = re.sub(r"<(script|style)[ >].*?</\1>", "", report.read_text(encoding="utf-8"), flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", page)).split())


def test_a_complete_run_has_every_section(tmp_path: Path) -> None:
    report = write_report(write_run(tmp_path))
    assert report == tmp_path / "report.html"
    text = text_of(report)
    for expected in (
        "sums Complete all steps are committed",
        "Steps 40 of 40 in 2 attempts",
        "Evaluation 0.400 reward_mean, best 0.400 after step 40",
        "Tokens per second 100",
        "Memory over time GPU 0, the fullest:",
        "GiB of 80.00 GiB (dashed)",
        "8 of 40 steps with samples",
        "Step 40: 4 of 4 samples",
        "exact 0.750",
        "3 tokens, truncated",
        "more characters",
        "attempt 1, step 3, update policy rank 0: out of memory ActivationSpike (70%): It was full.",
        "microBatchTokens 4096 → 1024 expected 6.00 GiB, observed 5.00 GiB, recovered in 6.0 s",
        "Injected faults",
        "step 9, update a process: out of memory CUDA out of memory",
        "1 2026-09-21 14:13:20 UTC 1 to 2",
        "This run has no prediction.",
        "NaN or infinite in 1 steps",
        "Memory plan",
        "torch 2.13.0",
    ):
        assert expected in text, expected
    assert "hf_very_secret" not in report.read_text()
    assert "name: HF_TOKEN, value: (not shown)" in text
    page = report.read_text()
    assert "<script>window.attacked" not in page
    assert page.count(HOSTILE) == 0
    assert len(page) < 8 << 20
    assert list(tmp_path.glob("*.partial")) == []


def test_a_run_in_progress_is_reported_and_not_changed(tmp_path: Path) -> None:
    write_run(tmp_path, 5, is_ended=False)
    ledger = tmp_path / "ledger.jsonl"
    growing = ledger.read_bytes() + b'{"kind": "step", "st'
    ledger.write_bytes(growing)
    text = text_of(write_report(tmp_path, tmp_path / "deep" / "page.html"))
    assert "sums Not ended In progress, or killed: step 5 was committed at" in text
    assert "Steps 5 of 40" in text
    assert ledger.read_bytes() == growing


def test_a_summary_of_an_earlier_command_does_not_hide_later_steps(tmp_path: Path) -> None:
    write_run(tmp_path, 5)
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.begin_attempt(1_790_009_000.0, {}, {}, {})
    assert "Not ended" in text_of(write_report(tmp_path))


def test_a_ledger_is_enough(tmp_path: Path) -> None:
    write_ledger(tmp_path / "run", [0.1, 0.2, 0.3])
    text = text_of(write_report(tmp_path / "run", tmp_path))
    assert (tmp_path / "report.html").is_file()
    assert "Reward now 0.300" in text
    assert "Memory over time" not in text
    assert "Peak memory by phase: policy" in text
    assert "There is no job.yaml." in text


def test_a_run_without_a_step_is_reported(tmp_path: Path) -> None:
    write_ledger(tmp_path, [])
    text = text_of(write_report(tmp_path))
    assert "Not ended No step is committed yet." in text
    assert "Failures and remedies None." in text


def test_the_secrets_of_an_unreadable_manifest_are_not_shown(tmp_path: Path) -> None:
    write_ledger(tmp_path, [0.5])
    (tmp_path / "job.yaml").write_text(MANIFEST.replace("steps: 40", "steps: forty"))
    assert "hf_very_secret" not in write_report(tmp_path).read_text()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "expected the output directory of a run, found no ledger.jsonl in"),
        ({"README.md": "# code"}, "give the directory that rljob run wrote to"),
        ({"ledger.jsonl": "{}\n"}, "ledger.jsonl, line 1 is corrupt"),
    ],
)
def test_a_directory_without_a_run_is_refused(files: dict[str, str], expected: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 85
    assert expected in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)


def test_a_report_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    write_ledger(tmp_path, [0.5])
    with pytest.raises(OutputUnavailable, match="could not be written"):
        write_report(tmp_path, tmp_path / "ledger.jsonl" / "report.html")
