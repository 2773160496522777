"""The optimizer's step: its state, created in the first step (8 bytes per parameter for Adam), and temporary copies.

The stack names torch.optim. In the first step it is the state itself; later, and in `_multi_tensor_*`, it is the
temporary copies of the foreach implementation, as large as the parameters they work on.
"""

from __future__ import annotations

from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.diagnosis.diagnosis import Diagnosis
from rljob_memory.diagnosis.gpu_holders import foreign_bytes
from rljob_memory.evidence.activity import Activity
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import Failure, FailureKind
from rljob_memory.sizes import human_bytes


def optimizer_state(failure: Failure, evidence: CollectedEvidence) -> Diagnosis | None:
    device = failure.device
    if failure.kind not in (FailureKind.ALLOCATOR, FailureKind.DRIVER) or failure.activity is not Activity.OPTIMIZER:
        return None
    more = f" {human_bytes(device.requested_bytes)} more" if device else " more"
    in_use = f" beside {human_bytes(device.allocated_bytes)} in tensors" if device and device.allocated_bytes else ""
    confidence = 0.8 if not foreign_bytes(failure) else 0.5
    return Diagnosis(
        FailureClass.OPTIMIZER_STATE, confidence, f"The optimizer's step asked for{more}{in_use}, which did not fit"
    )
