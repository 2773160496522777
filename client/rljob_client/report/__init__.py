"""The report of a run: one HTML file with its learning curves, samples, memory, failures and configuration."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from rljob_client.report.page import report_html
from rljob_client.report.run_files import read_run
from rljob_client.run_directory.durable_files import write_atomically, writing

__all__ = ["write_report"]

REPORT_NAME = "report.html"


def write_report(directory: Path, output: Path | None = None) -> Path:
    """Write the report of the run in `directory`, which may be in progress, and return its path.

    `output`: the file, or a directory for `report.html`; default: `directory`. Raises `OutputUnavailable` if
    `directory` is not that of a run, its ledger is damaged, or the file cannot be written.
    """
    html = report_html(read_run(directory), datetime.now(UTC))
    output = output or directory
    if output.is_dir():
        output /= REPORT_NAME
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, html.encode("utf-8", "backslashreplace"))
    return output
