"""Weighs the last straw against everything else that takes the GPU: chance decides which request finds it full.

The stack of a failure shows which request came last. The ledger and the trend show what took the memory before it. A
request that would have fit without a large item that nobody expects there is not the cause; neither is one that fails
after a steady growth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.diagnosis.diagnosis import Diagnosis
from rljob_memory.diagnosis.growth import cache_growth
from rljob_memory.diagnosis.ledger import Ledger, Unexpected
from rljob_memory.diagnosis.rules.optimizer_state import is_after_the_first_step
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import Failure

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


def weighed(
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
