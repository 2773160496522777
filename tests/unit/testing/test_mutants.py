"""The mutants fit the code, and their runner tells the killed from the survivors."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_testing.repository import ROOT
from tests.mutants import run
from tests.mutants.run import Mutant, main, read_mutants

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


def test_killed_mutants_and_survivors_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = (ROOT / LEASE).read_text()
    killed = Mutant("It waits", LEASE, 'return "Create"', 'return "Wait"', (DECIDE,))
    survivor = Mutant("It leads for ever", LEASE, NO_DEADLINE, "if False:", (DECIDE,))
    monkeypatch.setattr(run, "read_mutants", lambda: [killed, survivor])
    assert main([]) == 1
    assert (ROOT / LEASE).read_text() == kept
    printed = capsys.readouterr().out
    assert next(line for line in printed.splitlines() if "It waits" in line).startswith("killed")
    assert next(line for line in printed.splitlines() if "It leads for ever" in line).startswith("survived")
    assert printed.splitlines()[-1].split() == ["1", "1", "0", "all"]
