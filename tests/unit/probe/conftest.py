from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.probe.probed_program import ProbedProgram, write_fake_torch


@pytest.fixture
def program(tmp_path: Path) -> ProbedProgram:
    return ProbedProgram(tmp_path)


@pytest.fixture
def gpu_program(program: ProbedProgram) -> ProbedProgram:
    """A program with a fake torch whose GPU can run out of memory."""
    write_fake_torch(program.directory)
    return program
