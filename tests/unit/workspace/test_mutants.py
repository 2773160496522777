"""The mutants fit the code."""

from __future__ import annotations

from rljob_testing.repository import ROOT
from tests.mutants.run import read_mutants


def test_every_mutant_fits_its_file_and_names_tests_that_exist() -> None:
    mutants = read_mutants()
    assert len({mutant.bug for mutant in mutants}) == len(mutants)
    for mutant in mutants:
        assert mutant.tests
        assert all((ROOT / test.partition("::")[0]).exists() for test in mutant.tests)
