"""Sending the weights to the engine needs full copies of them for a moment: gathered parameters, packed buckets.

The stack or the phase shows that it was then (verl 6729 and 6772, SkyRL 1623). Saving a checkpoint gathers the weights
in the same way (SkyRL 70), and looks the same in memory.
"""

from __future__ import annotations

from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.diagnosis.diagnosis import Diagnosis
from rljob_memory.evidence.activity import Activity
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import Failure, FailureKind
from rljob_memory.sizes import human_bytes


def weight_sync_spike(failure: Failure, evidence: CollectedEvidence) -> Diagnosis | None:
    if failure.kind not in (FailureKind.ALLOCATOR, FailureKind.DRIVER, FailureKind.NCCL, FailureKind.ENGINE_WAKE):
        return None
    if failure.kind is FailureKind.ENGINE_WAKE:
        # While the engine wakes, its own memory fails; the copies are at most in the way.
        confidence = 0.45 if failure.phase == "sync" else 0.0
    elif failure.activity is Activity.WEIGHT_SYNC:
        confidence = 0.75
    elif failure.phase == "sync":
        confidence = 0.7
    else:
        confidence = 0.45 if failure.activity is Activity.CHECKPOINT else 0.0
    if not confidence:
        return None
    device = failure.device
    more = f": {human_bytes(device.requested_bytes)} more did not fit" if device else ""
    return Diagnosis(
        FailureClass.WEIGHT_SYNC_SPIKE,
        confidence,
        f"The copies of the weights for the engine needed more memory than was left{more}",
    )
