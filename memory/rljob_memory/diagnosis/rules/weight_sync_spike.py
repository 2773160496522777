"""Sending the weights to the engine needs full copies of them for a moment: gathered parameters, packed buckets.

The stack or the phase shows that it was then (verl 6729 and 6772, SkyRL 1623). Saving a checkpoint gathers the weights
in the same way (SkyRL 70), and looks the same in memory.
"""

from __future__ import annotations

from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.diagnosis.diagnosis import Diagnosis
from rljob_memory.diagnosis.ledger import Ledger
from rljob_memory.evidence.activity import Activity
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import Failure, FailureKind
from rljob_memory.sizes import human_bytes

_COPIES = {Activity.WEIGHT_SYNC: 0.75, Activity.GATHERING: 0.65, Activity.CHECKPOINT: 0.5}
_WHAT = {
    Activity.WEIGHT_SYNC: "The copies of the weights for the engine",
    Activity.GATHERING: "The full parameters, gathered from all ranks,",
    Activity.CHECKPOINT: "The copies of the weights for a checkpoint",
}


def weight_sync_spike(failure: Failure, evidence: CollectedEvidence, ledger: Ledger) -> Diagnosis | None:
    of_the_gpu = failure.is_of_the_gpu or failure.kind in (FailureKind.NCCL, FailureKind.ENGINE_WAKE)
    if not of_the_gpu:
        return None
    if failure.kind is FailureKind.ENGINE_WAKE:
        # While the engine wakes, its own memory fails; the copies are at most in the way.
        confidence = 0.45 if failure.phase == "sync" else 0.0
    elif failure.phase == "sync":
        confidence = 0.75 if failure.activity in _COPIES else 0.7
    else:
        confidence = _COPIES.get(failure.activity, 0.0) if failure.activity else 0.0
    if not confidence:
        return None
    device, what = failure.device, _WHAT.get(failure.activity or Activity.WEIGHT_SYNC, _WHAT[Activity.WEIGHT_SYNC])
    more = f": {human_bytes(device.requested_bytes)} more did not fit" if device else ""
    return Diagnosis(
        FailureClass.WEIGHT_SYNC_SPIKE,
        confidence,
        f"{what} needed more memory than was left{more}",
    )
