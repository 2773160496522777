"""Results of a test run: durations by test, and failures that a second run of the same tests does not repeat."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TypedDict

import pytest

REPEATED = ("tests/integration/", "tests/e2e/")
"""Starts of paths whose tests are repeated: they depend on processes, ports and timing. A unit test is not flaky."""
MOST_REPEATED = 10
"""More failures than this have one cause, which a repetition does not remove."""
KEPT = 50
"""Number of files of results that are kept, the newest."""


class Results(TypedDict):
    """The content of a file of results."""

    seconds: dict[str, float]
    """Duration of each test, with the fixtures that it is the first to use, by node id."""
    failed: list[str]
    """Tests that failed, without flaky ones."""
    flaky: dict[str, str]
    """The error of each test that failed and then passed when it was repeated."""


def read_results(path: Path) -> Results:
    """The results in a file, or empty ones if there is none or if it is damaged."""
    try:
        found = json.loads(path.read_text())
        return Results(seconds=found["seconds"], failed=found["failed"], flaky=found["flaky"])
    except (OSError, ValueError, KeyError, TypeError):
        return Results(seconds={}, failed=[], flaky={})


def newest_seconds(folder: Path) -> dict[str, float]:
    """Durations by node id of the latest run whose results are in `folder`."""
    paths = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    return read_results(paths[-1])["seconds"] if paths else {}


class Recorder:
    """Writes the results to `path`. `repeats`: first repeats failures, in one process, after all other tests."""

    def __init__(self, path: Path, repeats: bool) -> None:
        self._path = path
        self._repeats = repeats
        self._seconds: dict[str, float] = defaultdict(float)
        self._flaky: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        terminal = session.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is None:
            return
        if self._repeats and session.exitstatus == pytest.ExitCode.TESTS_FAILED:
            self._repeat(session, terminal)
        self._write(failures_of(terminal))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test in self._flaky:
            terminalreporter.write_line(f"flaky: {test}")
        terminalreporter.write_line(f"durations, failed and flaky tests: {self._path}")

    def _repeat(self, session: pytest.Session, terminal: pytest.TerminalReporter) -> None:
        wanted = [test for test in failures_of(terminal) if test.startswith(REPEATED)]
        if not 0 < len(wanted) <= MOST_REPEATED:
            return
        terminal.write_line("")
        terminal.write_line(f"repeating {len(wanted)} failed tests of tests/integration and tests/e2e")
        repeated = run_again(wanted, session.config.rootpath)
        for test in wanted:
            if test in repeated["seconds"] and test not in repeated["failed"]:
                self._flaky[test] = take_failures(terminal, test)
        if not failures_of(terminal):
            session.exitstatus = pytest.ExitCode.OK

    def _write(self, failed: list[str]) -> None:
        """Add the durations to those of earlier runs of the same commit."""
        before = read_results(self._path)
        seconds = before["seconds"] | {test: round(duration, 2) for test, duration in self._seconds.items()}
        results = Results(seconds=seconds, failed=failed, flaky=before["flaky"] | self._flaky)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(results, indent=1))
        for old in sorted(self._path.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            old.unlink()


def failures_of(terminal: pytest.TerminalReporter) -> list[str]:
    """The node ids of failed tests, and of files that could not be collected."""
    reports = [*terminal.stats.get("failed", []), *terminal.stats.get("error", [])]
    return list(dict.fromkeys(report.nodeid for report in reports))


def take_failures(terminal: pytest.TerminalReporter, test: str) -> str:
    """Count the test as flaky instead of failed. Returns its error."""
    taken = []
    for outcome in ("failed", "error"):
        reports = terminal.stats.pop(outcome, [])
        taken += [report for report in reports if report.nodeid == test]
        if kept := [report for report in reports if report.nodeid != test]:
            terminal.stats[outcome] = kept
    terminal.stats.setdefault("flaky", []).append(taken[0])
    return "\n".join(report.longreprtext for report in taken)


def run_again(tests: list[str], root: Path) -> Results:
    """Run the tests in a process of their own. Returns empty results if that process does not finish."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "repeated.json"
        command = [sys.executable, "-m", "pytest", f"--results={path}", *tests]
        subprocess.run(command, cwd=root, check=False)
        return read_results(path)
