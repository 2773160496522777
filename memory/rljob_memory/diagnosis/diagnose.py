"""`diagnose(evidence)` asks every rule and returns the causes that fit, the likeliest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import MAX_DIAGNOSES_KEPT, DiagnosisStatus
from rljob_api.step_report import Evidence
from rljob_memory.diagnosis.classes import Diagnosis, FailureClass
from rljob_memory.diagnosis.growth import cache_growth
from rljob_memory.diagnosis.ledger import Ledger, Unexpected, ledger_of
from rljob_memory.diagnosis.program_advice import with_program_advice
from rljob_memory.diagnosis.rules import RULES
from rljob_memory.diagnosis.rules.engine_memory import sleep_alone
from rljob_memory.diagnosis.rules.other_processes import contexts_alone
from rljob_memory.diagnosis.rules.policy_memory import is_after_the_first_step
from rljob_memory.diagnosis.rules.torch_cache import growth_alone
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import Failure
from rljob_memory.evidence.reports import evidence_of_report
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
    after = _weighed([found for _, found in fired], failure, evidence, ledger)
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
    weighted = _weighed(fired, failure, evidence, ledger)
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
    message = f"Memory ran out ({failure.kind.meaning}), and the evidence does not show why{contradiction}{text}"
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
    during = f"during {failure.activity.meaning}" if failure.activity else failure.phase or ""
    parts = [part for part in (process, step, micro_batch, during) if part]
    return f" ({', '.join(parts)})" if parts else ""


# Weighs the last straw against everything else that takes the GPU: chance decides which request finds it full.
#
# The stack of a failure shows which request came last. The ledger and the trend show what took the memory before it. A
# request that would have fit without a large item that nobody expects there is not the cause; neither is one that fails
# after a steady growth.

_LAST_STRAWS = frozenset(
    {
        FailureClass.ACTIVATION_SPIKE,
        FailureClass.WEIGHT_SYNC_SPIKE,
        FailureClass.MODEL_WEIGHTS,
        FailureClass.OPTIMIZER_STATE,
    }
)
_LARGE_SHARE = 0.25
"""Share of the GPU above which an item explains a full one."""
_AFTER_GROWTH = 0.5
_AFTER_THE_FIRST_STEP = 0.5
_BESIDE_AN_ENGINE = 0.6
_BESIDE_OTHERS = 0.5
_SLOPE = 0.4
_TIMES_THE_CACHE = 4
_BESIDE_LARGER_OTHERS = 0.4
"""Most confidence in a last straw after a growth, in a pass that fit a step before, beside an engine that is awake,
beside other processes, and beside others that hold more than the failing process's tensors."""


def _weighed(
    found: Sequence[Diagnosis], failure: Failure, evidence: CollectedEvidence, ledger: Ledger
) -> list[Diagnosis]:
    """The diagnoses, with less confidence in a last straw if something else took the memory."""
    most = dict.fromkeys(_LAST_STRAWS, _most_confidence(failure, evidence, ledger))
    if _others_hold_more_than_its_cache(failure, evidence, ledger):
        most[FailureClass.FRAGMENTATION] = _BESIDE_LARGER_OTHERS
    if is_after_the_first_step(failure, evidence, ledger) or ledger.is_full_of_state:
        most[FailureClass.ACTIVATION_SPIKE] = min(most[FailureClass.ACTIVATION_SPIKE], _AFTER_THE_FIRST_STEP)
    return [
        replace(diagnosis, confidence=min(diagnosis.confidence, most.get(diagnosis.failure_class, 1.0)))
        for diagnosis in found
    ]


def _others_hold_more_than_its_cache(failure: Failure, evidence: CollectedEvidence, ledger: Ledger) -> bool:
    """True if the pieces of torch's cache are a small item on this GPU, beside what other processes hold of it.

    A foreign process is unexpected there. An engine of the same job is not: it takes its share in a healthy run too.
    """
    device, others = failure.device, ledger.foreign_bytes()
    if device is None or not device.total_bytes or evidence.shows_a_trainer or failure.role is not None:
        return False
    return others >= max(_LARGE_SHARE * device.total_bytes, _TIMES_THE_CACHE * (device.cached_bytes or 0))


def _most_confidence(failure: Failure, evidence: CollectedEvidence, ledger: Ledger) -> float:
    bounds = [1.0]
    if ledger.growths or cache_growth(evidence.series):
        bounds.append(_AFTER_GROWTH)
    device = failure.device
    if device is None or not device.total_bytes:
        return min(bounds)
    missing = device.requested_bytes - (device.free_bytes or 0)
    for item in ledger.unexpected:
        if item.failure_class is not FailureClass.FRAGMENTATION and item.size_bytes >= missing:
            bounds.append(_beside(item, ledger))
    if ledger.foreign_bytes() > (device.allocated_bytes or device.process_bytes or 0):
        bounds.append(_BESIDE_LARGER_OTHERS)
    return min(bounds)


def _beside(item: Unexpected, ledger: Ledger) -> float:
    """Most confidence in a last straw beside an item that nobody expects: the less, the larger its share."""
    if item.share < _LARGE_SHARE:
        return 1.0
    most = _BESIDE_AN_ENGINE if ledger.engine_is_in_the_process else _BESIDE_OTHERS
    return max(round(most - _SLOPE * (item.share - _LARGE_SHARE), 2), _BESIDE_LARGER_OTHERS)


# Diagnoses in the form of the API, and the diagnosis of evidence that another trainer reports as text.

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
