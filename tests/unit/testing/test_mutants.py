"""The mutants fit the code, and their runner tells the killed from the survivors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rljob_testing.repository import ROOT
from tests.mutants.run import read_mutants

LEASE = "operator/rljob_operator/kube/lease.py"
DECIDE = "tests/unit/operator/kube/test_lease_election.py::test_who_may_do_what"
NO_DEADLINE = "if time.monotonic() > self._renewed_at + self._times.renew_deadline:"


def test_every_mutant_fits_its_file_and_names_tests_that_exist() -> None:
    mutants = read_mutants()
    assert len({mutant.bug for mutant in mutants}) == len(mutants)
    for mutant in mutants:
        assert mutant.tests
        assert all((ROOT / test.partition("::")[0]).exists() for test in mutant.tests)


def test_a_mutant_whose_text_is_gone_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "mutants.toml"
    path.write_text(f"[[mutant]]\nbug = 'Nobody leads'\nfile = '{LEASE}'\nold = 'gone'\nnew = ''\ntests = ['{DECIDE}']")
    with pytest.raises(ValueError, match=f"found none, or several, for:\n  {LEASE}: Nobody leads\n"):
        read_mutants(path)


def test_killed_mutants_and_survivors_are_counted(tmp_path: Path) -> None:
    killed = ("It waits", 'return "Create"', 'return "Wait"')
    survivor = ("It leads for ever", NO_DEADLINE, "if False:")
    path = tmp_path / "mutants.toml"
    path.write_text(
        "".join(
            f"[[mutant]]\nbug = '{bug}'\nfile = '{LEASE}'\nold = '{old}'\nnew = '{new}'\ntests = ['{DECIDE}']\n"
            for bug, old, new in (killed, survivor)
        )
    )
    before = (ROOT / LEASE).read_text()
    command = [sys.executable, "-m", "tests.mutants.run", "--mutants", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert (ROOT / LEASE).read_text() == before
    first, second, *_, last = done.stdout.splitlines()
    assert (first.split()[0], second.split()[0]) == ("killed", "survived")
    assert last.split() == ["1", "1", "0", "all"]
