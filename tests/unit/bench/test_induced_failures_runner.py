"""The runner continues after any failure of a program."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from bench.programs.induced_failures import save
from rljob_memory.diagnosis import FailureClass
from rljob_testing.induced_failures.catalogue import Program
from rljob_testing.induced_failures.induce import Row, induce

NOWHERE = Program(FailureClass.UNKNOWN, "no_such_program", lambda folder: None, 5, {}, needs_gpu=False)


def test_a_program_that_takes_too_long_is_killed_and_recorded(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(600)")
    begun = time.monotonic()
    row = induce(replace(NOWHERE, variables={"PYTHONPATH": str(tmp_path)}), tmp_path, deadline=begun)
    assert row.ended == "timed out"
    assert time.monotonic() - begun < 300


def test_record_and_evidence_are_complete_after_each_program(tmp_path: Path) -> None:
    save([Row("Unknown", "first", "skipped", 1.0, note="needs an NVIDIA GPU")], tmp_path)
    assert "needs an NVIDIA GPU" in (tmp_path / "induced_failures.json").read_text()
    assert (tmp_path / "recorded.tar.gz").stat().st_size > 0
