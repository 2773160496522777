"""Diagnoses of all recorded failures, from public threads and induced ones."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rljob_memory.diagnosis import FailureClass, diagnose
from tests.unit.memory.diagnosis.recorded import recorded_evidence, recorded_failures

CASES = recorded_failures()


@pytest.mark.parametrize(("expected", "path"), CASES, ids=[f"{cls}-{path.stem}" for cls, path in CASES])
def test_the_recorded_class_comes_first(expected: FailureClass, path: Path) -> None:
    diagnoses = diagnose(recorded_evidence(path))
    assert [str(diagnosis.failure_class) for diagnosis in diagnoses][:1] == [str(expected)]


@pytest.mark.parametrize(("expected", "path"), CASES, ids=[f"{cls}-{path.stem}" for cls, path in CASES])
def test_no_other_class_has_a_confidence_above_0_8(expected: FailureClass, path: Path) -> None:
    sure = {diagnosis.failure_class for diagnosis in diagnose(recorded_evidence(path)) if diagnosis.confidence > 0.8}
    assert sure <= {expected}


def test_each_class_has_at_least_two_recorded_failures() -> None:
    counts = Counter(expected for expected, _ in CASES)
    assert {failure_class for failure_class in FailureClass if counts[failure_class] < 2} == set()
