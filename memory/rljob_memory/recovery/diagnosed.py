"""Evidence as it is reported, with the causes that fit."""

from __future__ import annotations

from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import MAX_DIAGNOSES_KEPT, DiagnosisStatus
from rljob_api.step_report import Evidence
from rljob_memory.diagnosis import Diagnosis, FailureClass, diagnose
from rljob_memory.evidence.documents import evidence_of_report

_MOST_NUMBERS = 32
_LONGEST_MESSAGE = 2_048


def diagnosed(evidence: Evidence, plan: MemoryPlan | None = None) -> Evidence:
    """`evidence` with its diagnoses, the likeliest first: those that it has, else those of its message and numbers.

    `plan`: the one it failed under, if that is known. There is always at least one diagnosis, Unknown if none fits.
    """
    if evidence.diagnoses:
        return evidence
    found = diagnose(evidence_of_report(evidence, plan))
    diagnoses = [diagnosis_status(diagnosis) for diagnosis in found[:MAX_DIAGNOSES_KEPT]] or [_unknown(evidence)]
    return evidence.model_copy(update={"diagnoses": diagnoses})


def diagnosis_status(diagnosis: Diagnosis) -> DiagnosisStatus:
    """A diagnosis as a type of the API."""
    return DiagnosisStatus(
        class_name=str(diagnosis.failure_class),
        confidence=diagnosis.confidence,
        message=diagnosis.message[:_LONGEST_MESSAGE],
        numbers=dict(list(diagnosis.numbers.items())[:_MOST_NUMBERS]),
    )


def _unknown(evidence: Evidence) -> DiagnosisStatus:
    message = f"Memory ran out for a reason that the evidence does not show: “{evidence.message[:160]}”."
    return DiagnosisStatus(class_name=str(FailureClass.UNKNOWN), confidence=0.5, message=message)
