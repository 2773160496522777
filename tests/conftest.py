"""Settings of all tests, and their order in several processes."""

from __future__ import annotations

import gc
import math
import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tests.results import Recorder, newest_seconds

os.environ["RLJOB_WARM_START"] = ""
"""Code that runs in a test's own process starts no servers. `rljob_testing.runs` has some for the runs of all tests."""

CLUSTER = "tests/e2e/"
"""Start of the paths of tests that need the cluster or its images. All of them are long."""
ON_NO_CLUSTER = "tests/e2e/test_built_images.py"
POD_PROCESSES = "tests/integration/test_pods_"
API_SERVERS = (
    "tests/integration/operator/test_operator_",
    "tests/integration/operator/test_job_",
    "tests/integration/chart/",
)
"""Groups with an API server each. Their tests wait more than they compute: together they occupy two cores."""
ONE_AT_A_TIME = (CLUSTER, *API_SERVERS, POD_PROCESSES)
"""Starts of paths whose tests share one cluster, one API server, or the fixed ports of `pod_processes.py`."""
LONGEST_FIRST = (
    CLUSTER,
    *API_SERVERS[:2],
    "tests/integration/test_run_ranks_recover.py",
    "tests/integration/test_run_recovers.py",
    "tests/integration/test_run_resumes.py",
    POD_PROCESSES,
    "tests/integration/test_run_digits.py",
    ON_NO_CLUSTER,
    API_SERVERS[2],
    "tests/integration/",
)
"""Without durations of an earlier run; all others are short."""
_SECONDS = pytest.StashKey[dict[str, float]]()
"""Durations of the scopes in an earlier run."""
_NICENESS = pytest.StashKey[int]()
"""Niceness of the processes that run no test of the cluster. Those tests take longest, one after the other, and the
kernel gives all of the cluster's processes together the share of one."""


def scope_of(path: str) -> str:
    """The tests that run in the same process as those of the file at `path`: a group's, or the file's own."""
    if path == ON_NO_CLUSTER:
        return path
    return next((start for start in ONE_AT_A_TIME if path.startswith(start)), path)


class FilesAndFolders(LoadScopeScheduling):
    """Runs a file in one process under `pytest -n`, and so a group of files whose tests share something."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid.partition("::")[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesAndFolders:
    config.option.loadscopereorder = False
    return FilesAndFolders(config, log)


class FailuresAtOnce:
    """Prints the name of each test when it fails: pytest does so at the end, which is half an hour later."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.write_line("")
            self._terminal.write_line(f"{report.when} of {report.nodeid} failed: {_error(report.longreprtext)}")


def _error(text: str) -> str:
    """The first line of the error in a report."""
    return next((line[1:].strip() for line in text.splitlines() if line.startswith("E ")), "")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rljob")
    group.addoption("--long", action="store_true", help="Also run tests marked `long`.")
    group.addoption(
        "--results", type=Path, help="File for durations, failed and flaky tests, in a folder of such files."
    )
    group.addoption(
        "--repeat", action="store_true", help="Repeat failed tests of integration and e2e once, at the end."
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    # The time of an example depends on the machine more than on the code.
    settings.register_profile("rljob", deadline=None, max_examples=100 if config.getoption("--long") else 25)
    settings.load_profile("rljob")
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(terminal))
        if results := config.getoption("--results"):
            config.stash[_SECONDS] = seconds_by_scope(newest_seconds(results.parent))
            config.pluginmanager.register(Recorder(results, repeats=config.getoption("--repeat")))


def pytest_configure_node(node: Any) -> None:
    """Give all processes the same durations: their tests must have the same order."""
    node.workerinput["seconds"] = node.config.stash.get(_SECONDS, {})


def seconds_by_scope(seconds: dict[str, float]) -> dict[str, float]:
    """The sums of the durations of tests, given by node id."""
    sums: dict[str, float] = defaultdict(float)
    for test, duration in seconds.items():
        sums[scope_of(test.partition("::")[0])] += duration
    return dict(sums)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, which later ignores the modules and tests that exist by then.

    Importing every test with its libraries creates little garbage, and a sixth of its time went into looking for it.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out long tests unless they are wanted. Put the longest groups first, so that all processes end together."""
    for item in items:
        if item.nodeid.startswith(CLUSTER):
            item.add_marker("long")
    if not config.getoption("--long") and not any(".py" in argument for argument in config.args):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("long")])
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    if hasattr(config, "workerinput"):
        config.stash[_NICENESS] = 10 if any(item.nodeid.startswith(CLUSTER) for item in items) else 0
        seconds = config.workerinput["seconds"]
        items.sort(key=lambda item: order_of(scope_of(item.nodeid.partition("::")[0]), seconds))


def order_of(scope: str, seconds: dict[str, float]) -> tuple[float, int]:
    """A sort key: scopes of unknown duration come first, by LONGEST_FIRST, then the longest."""
    return -seconds.get(scope, math.inf), _place(scope)


def _place(scope: str) -> int:
    if scope in LONGEST_FIRST:
        return LONGEST_FIRST.index(scope)
    return len(LONGEST_FIRST) - scope.startswith(LONGEST_FIRST[-1])


def pytest_runtest_setup(item: pytest.Item) -> None:
    niceness = item.config.stash.get(_NICENESS, 0)
    if not item.nodeid.startswith(CLUSTER):
        os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))
