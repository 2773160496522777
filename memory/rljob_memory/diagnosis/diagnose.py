"""`diagnose(evidence)` asks every rule and returns the causes that fit, the likeliest first."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.diagnosis.diagnosis import Diagnosis
from rljob_memory.diagnosis.ledger import Ledger, ledger_of
from rljob_memory.diagnosis.program_advice import with_program_advice
from rljob_memory.diagnosis.rules import RULES
from rljob_memory.diagnosis.rules.controller_context import contexts_alone
from rljob_memory.diagnosis.rules.engine_not_asleep import sleep_alone
from rljob_memory.diagnosis.rules.retained_graph import growth_alone
from rljob_memory.diagnosis.weighing import weighed
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import Failure
from rljob_memory.sizes import human_bytes

_LEAST_CONFIDENCE = 0.3
_UNKNOWN_CONFIDENCE = 0.5
_UNKNOWN_BESIDE = 0.5
"""If the confidence of the likeliest cause is lower than this, `Unknown` is listed too."""


@dataclass(frozen=True, slots=True)
class FiredRule:
    """A rule that found its cause."""

    name: str
    failure_class: FailureClass
    confidence: float
    """By the rule alone."""
    weighed_confidence: float
    """Beside everything else that takes the GPU; below 0.3 it is left out."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The way to the diagnoses of a failure."""

    ledger: Ledger
    rules: tuple[FiredRule, ...]


def explain(evidence: CollectedEvidence) -> Explanation | None:
    """The ledger and the rules that fired; None without a failure."""
    failure = evidence.failure
    if failure is None:
        return None
    ledger = ledger_of(failure, evidence)
    fired = _fired(failure, evidence, ledger)
    after = weighed([found for _, found in fired], failure, evidence, ledger)
    rules = (
        FiredRule(name, before.failure_class, before.confidence, found.confidence)
        for (name, before), found in zip(fired, after, strict=True)
    )
    return Explanation(ledger, tuple(sorted(rules, key=lambda rule: -rule.weighed_confidence)))


def diagnose(evidence: CollectedEvidence) -> list[Diagnosis]:
    """The causes that fit the first failure, best first; `Unknown` if none does.

    Without a failure, a growth of memory that ends in one, contexts of processes that do not work on their GPU, or
    weights that an engine's sleep left there; else empty.
    """
    failure = evidence.failure
    if failure is None:
        found_alone = growth_alone(evidence) or contexts_alone(evidence) or sleep_alone(evidence)
        return [replace(found_alone, is_of_rljob=evidence.is_of_rljob)] if found_alone else []
    ledger = ledger_of(failure, evidence)
    fired = [found for _, found in _fired(failure, evidence, ledger)]
    weighted = weighed(fired, failure, evidence, ledger)
    fitting = sorted(
        (diagnosis for diagnosis in weighted if diagnosis.confidence >= _LEAST_CONFIDENCE),
        key=lambda diagnosis: -diagnosis.confidence,
    )
    best = fitting[0].confidence if fitting else 0.0
    if best < _UNKNOWN_BESIDE:
        fitting.append(_unknown(failure, _UNKNOWN_CONFIDENCE if not fitting else round(best / 2, 2)))
    numbers = {**_numbers(failure), "failures": evidence.failures}
    completed = [_completed(diagnosis, failure, numbers, evidence.is_of_rljob) for diagnosis in fitting]
    return [with_program_advice(diagnosis, ledger) for diagnosis in completed]


def _fired(failure: Failure, evidence: CollectedEvidence, ledger: Ledger) -> list[tuple[str, Diagnosis]]:
    """Names of the rules that found their cause, and what they found."""
    return [(rule.__name__, found) for rule in RULES if (found := rule(failure, evidence, ledger)) is not None]


def _unknown(failure: Failure, confidence: float) -> Diagnosis:
    device = failure.device
    contradiction = ""
    if device and device.free_bytes is not None and device.free_bytes > device.requested_bytes:
        free, requested = human_bytes(device.free_bytes), human_bytes(device.requested_bytes)
        contradiction = f", although {free} were free for a request of {requested}"
    text = f": “{failure.text[:160]}”" if failure.text else ""
    message = f"Memory ran out ({failure.kind}), and the evidence does not show why{contradiction}{text}"
    return Diagnosis(FailureClass.UNKNOWN, confidence, message)


def _completed(diagnosis: Diagnosis, failure: Failure, numbers: dict[str, int], is_of_rljob: bool) -> Diagnosis:
    """The diagnosis with the place of the failure and all numbers of its message."""
    return replace(
        diagnosis,
        message=f"{diagnosis.message}{_place(failure)}.",
        numbers={**numbers, **diagnosis.numbers},
        is_of_rljob=is_of_rljob,
    )


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
    during = f"during {failure.activity}" if failure.activity else failure.phase or ""
    parts = [part for part in (process, step, micro_batch, during) if part]
    return f" ({', '.join(parts)})" if parts else ""
