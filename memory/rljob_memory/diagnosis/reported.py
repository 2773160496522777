"""Diagnoses in the form of the API, and the diagnosis of evidence that another trainer reports as text."""

from __future__ import annotations

from collections.abc import Sequence

from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import MAX_DIAGNOSES_KEPT, DiagnosisStatus
from rljob_api.step_report import Evidence
from rljob_memory.diagnosis.diagnose import diagnose
from rljob_memory.diagnosis.diagnosis import Diagnosis
from rljob_memory.evidence.reports import evidence_of_report

_MOST_NUMBERS = 32
_LONGEST_MESSAGE = 2_048


def diagnosed(evidence: Evidence, plan: MemoryPlan | None = None) -> Evidence:
    """`evidence` with its diagnoses, the likeliest first: those that it has, else those of its message and numbers.

    `plan`: the one it failed under, if known. There is always at least one diagnosis, `Unknown` if no cause fits.
    """
    if evidence.diagnoses:
        return evidence
    found = diagnose(evidence_of_report(evidence, plan))
    return evidence.model_copy(update={"diagnoses": diagnosis_statuses(found)})


def diagnosis_statuses(diagnoses: Sequence[Diagnosis]) -> list[DiagnosisStatus]:
    """The likeliest diagnoses, as many as the API takes."""
    return [_status(diagnosis) for diagnosis in diagnoses[:MAX_DIAGNOSES_KEPT]]


def _status(diagnosis: Diagnosis) -> DiagnosisStatus:
    return DiagnosisStatus(
        class_name=str(diagnosis.failure_class),
        confidence=diagnosis.confidence,
        message=diagnosis.message[:_LONGEST_MESSAGE],
        numbers=dict(list(diagnosis.numbers.items())[:_MOST_NUMBERS]),
    )
