"""Diagnoses of the failures in public threads: those that are right stay right, and the known misses are named."""

from __future__ import annotations

import pytest

from tests.unit.memory.diagnosis.recorded import PublicFailure, diagnoses_of, public_failures

SURE = 0.8


@pytest.mark.parametrize("failure", public_failures(), ids=lambda failure: failure.name)
def test_the_first_diagnosis_is_as_labelled(failure: PublicFailure) -> None:
    best = next(iter(diagnoses_of(failure.text)), None)
    assert (str(best.failure_class) if best else None) in failure.expected
    assert not (best and failure.is_miss and best.confidence > SURE)
