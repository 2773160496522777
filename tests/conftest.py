"""What holds for all tests, and which of them may run at the same time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

# How long an example takes says more about the machine than about the code.
settings.register_profile("rljob", deadline=None)
settings.load_profile("rljob")

TESTS = Path(__file__).parent
ONE_AT_A_TIME = ("tests/e2e/", "tests/integration/chart/", "tests/integration/operator/")
"""Folders whose tests share one cluster, or one API server."""
LONGEST_FIRST = ("e2e", "integration")


class FilesAndFolders(LoadScopeScheduling):
    """`pytest -n`: the tests of a file run in one process, and so do those of a folder that shares something."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return next((folder for folder in ONE_AT_A_TIME if path.startswith(folder)), path)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesAndFolders:
    config.option.loadscopereorder = False
    return FilesAndFolders(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Two processes end at about the same time where each begins with what takes longest."""
    if hasattr(config, "workerinput"):
        items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    folder = item.path.relative_to(TESTS).parts[0]
    return LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)
