"""Tests that share something run in one process."""

from __future__ import annotations

import pytest

from rljob_testing.repository import ROOT
from tests.conftest import LONGEST_FIRST, ONE_AT_A_TIME, POD_PROCESSES, scope_of

TESTS = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests").rglob("test_*.py"))]


def test_all_users_of_the_pods_ports_run_in_one_process() -> None:
    users = [path for path in TESTS if "tests.integration.pod_processes" in (ROOT / path).read_text()]
    users.remove("tests/unit/testing/test_processes_of_a_run.py")
    assert len(users) > 1
    assert {scope_of(path) for path in users} == {POD_PROCESSES}


@pytest.mark.parametrize("start", [*ONE_AT_A_TIME, *LONGEST_FIRST])
def test_every_group_has_tests(start: str) -> None:
    assert any(path.startswith(start) for path in TESTS)


def test_other_files_have_a_process_of_their_own() -> None:
    assert scope_of("tests/integration/test_run_digits.py") == "tests/integration/test_run_digits.py"
    assert scope_of("tests/integration/operator/test_operator_life.py") == "tests/integration/operator/"
