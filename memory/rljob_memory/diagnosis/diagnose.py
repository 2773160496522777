"""`diagnose(evidence)` returns the causes that fit a failure, the likeliest first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import MAX_DIAGNOSES_KEPT, DiagnosisStatus
from rljob_api.step_report import Evidence
from rljob_memory.diagnosis.balance import Balance
from rljob_memory.diagnosis.causes.finding import Finding, Weight
from rljob_memory.diagnosis.causes.table import found_causes, found_without_failure
from rljob_memory.diagnosis.classes import Diagnosis, FailureClass
from rljob_memory.diagnosis.program_advice import with_program_advice
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import Failure
from rljob_memory.evidence.reports import evidence_of_report
from rljob_memory.sizes import human_bytes

_STRUCTURED, _EXIT_FACTS, _TEXT = 1.0, 0.95, 0.6
"""Highest confidence by the source of the numbers: the failing process, the kubelet, text."""
_PART = {Weight.CERTAIN: 1.0, Weight.STRONG: 0.9, Weight.LIKELY: 0.75, Weight.POSSIBLE: 0.5, Weight.FAINT: 0.35}
"""Part of that confidence, by the weight of the cause."""


def diagnose(evidence: CollectedEvidence) -> list[Diagnosis]:
    """The causes that fit the first failure, best first; `Unknown` if none does.

    Without a failure, a growth of memory that ends in one, contexts of processes that do not work on their GPU, or
    weights that an engine's sleep left there; else empty.
    """
    failure = evidence.failure
    if failure is None:
        alone = found_without_failure(evidence)
        if alone is None:
            return []
        name, finding = alone
        numbers = {**finding.numbers, "failures": 0}
        return [
            Diagnosis(name, round(_TEXT * _PART[finding.weight], 2), finding.message, numbers, "", evidence.is_of_rljob)
        ]
    balance = Balance(failure, evidence)
    causes = found_causes(balance)
    if not causes or causes[0][1].weight < Weight.POSSIBLE:  # `Unknown` is listed if no cause is likely
        unknown = FailureClass.UNKNOWN, Finding(Weight.POSSIBLE, _unknown_message(failure))
        causes = [*causes[:1], unknown, *causes[1:]] if causes else [unknown]
    numbers = {**_numbers(failure), "failures": evidence.failures}
    most = _confidence_of_the_source(failure)
    best = _PART[causes[0][1].weight]
    found = [
        Diagnosis(
            name,
            round(most * (best / 2 if name is FailureClass.UNKNOWN and len(causes) > 1 else _PART[finding.weight]), 2),
            f"{finding.message}{_place(failure)}.",
            {**numbers, **finding.numbers},
            is_of_rljob=evidence.is_of_rljob,
        )
        for name, finding in causes
    ]
    return [with_program_advice(diagnosis, balance) for diagnosis in found]


def _confidence_of_the_source(failure: Failure) -> float:
    if failure.is_structured:
        return _STRUCTURED
    return _EXIT_FACTS if failure.is_of_the_kubelet else _TEXT


def _unknown_message(failure: Failure) -> str:
    device = failure.device
    contradiction = ""
    if device and device.free_bytes is not None and device.free_bytes > device.requested_bytes:
        free, requested = human_bytes(device.free_bytes), human_bytes(device.requested_bytes)
        contradiction = f", although {free} were free for a request of {requested}"
    text = f": “{failure.text[:160]}”" if failure.text else ""
    return f"Memory ran out ({failure.kind.meaning}), and the evidence does not show why{contradiction}{text}"


def _numbers(failure: Failure) -> dict[str, int]:
    named = {"rank": failure.rank, "step": failure.step, "micro_batch": failure.micro_batch}
    numbers = {name: value for name, value in named.items() if value is not None}
    numbers.update(failure.sizes)
    if failure.device:
        numbers.update(failure.device.numbers())
        if failure.device.gpu is not None:
            numbers["gpu"] = failure.device.gpu
    return numbers


def _place(failure: Failure) -> str:
    """` (policy rank 3, step 12, during the backward pass)`, as far as it is known."""
    process = " ".join(
        part for part in (failure.role, f"rank {failure.rank}" if failure.rank is not None else None) if part
    )
    step = f"step {failure.step}" if failure.step is not None else ""
    micro_batch = f"micro-batch {failure.micro_batch}" if failure.micro_batch is not None else ""
    during = f"during {failure.activity.meaning}" if failure.activity else failure.phase or ""
    parts = [part for part in (process, step, micro_batch, during) if part]
    return f" ({', '.join(parts)})" if parts else ""


# Diagnoses in the form of the API, and the diagnosis of the evidence that another trainer reports.

_MOST_NUMBERS = 32
_LONGEST_MESSAGE = 2_048


def diagnosed(evidence: Evidence, plan: MemoryPlan | None = None) -> Evidence:
    """`evidence` with its diagnoses, the likeliest first: those that it has, else those of the account or the message.

    `plan`: the one it failed under, if known. There is always at least one diagnosis, `Unknown` if no cause fits.
    """
    if evidence.diagnoses:
        return evidence
    found = diagnose(evidence_of_report(evidence, plan))
    return evidence.model_copy(update={"diagnoses": diagnosis_statuses(found)})


def diagnosis_statuses(diagnoses: Sequence[Diagnosis]) -> list[DiagnosisStatus]:
    """The likeliest diagnoses, as many as the API takes."""
    return [
        DiagnosisStatus(
            class_name=str(diagnosis.failure_class),
            confidence=diagnosis.confidence,
            message=diagnosis.message[:_LONGEST_MESSAGE],
            numbers=dict(islice(diagnosis.numbers.items(), _MOST_NUMBERS)),
        )
        for diagnosis in diagnoses[:MAX_DIAGNOSES_KEPT]
    ]
