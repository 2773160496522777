"""Each program of rljob_testing.induced_failures really ends in its failure, and the diagnosis names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_testing.induced_failures.catalogue import FailingProgram, programs
from rljob_testing.induced_failures.induce import induce

PROGRAMS = [
    pytest.param(program, id=program.title, marks=pytest.mark.gpu if program.needs_gpu else ())
    for program in programs()
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_induced_class_is_diagnosed_first(program: FailingProgram, tmp_path: Path) -> None:
    row = induce(program, tmp_path)
    if row.ended == "skipped":
        pytest.skip(f"{program.title}: {row.note}")
    assert row.ended == "failed", row.note
    assert row.diagnoses[0]["class"] == str(program.failure_class)
    assert not [found for found in row.diagnoses[1:] if found["confidence"] > 0.8]
