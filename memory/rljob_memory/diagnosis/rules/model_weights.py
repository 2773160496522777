"""The weights do not fit: memory runs out while the model is loaded, built or moved to the GPU.

At that time a process has neither activations nor optimizer state: its tensors are weights. An engine loads its weights
before its cache is sized, so its share of the GPU does not matter either.
"""

from __future__ import annotations

from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.diagnosis.diagnosis import Diagnosis
from rljob_memory.diagnosis.ledger import Ledger
from rljob_memory.evidence.activity import Activity
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import Failure, FailureKind
from rljob_memory.sizes import human_bytes

_NEARLY_FULL = 0.6
"""Share of the GPU that the tensors and the request take together."""
_COPY = 0.65
_FULL = 0.98
_SMALL_REQUEST = 0.01


def model_weights(failure: Failure, evidence: CollectedEvidence, ledger: Ledger) -> Diagnosis | None:
    if fills_the_gpu_with_weights(failure):
        return Diagnosis(
            FailureClass.MODEL_WEIGHTS,
            0.5,
            "The engine's tensors fill the whole GPU, beyond any share for its KV cache, before it has CUDA graphs",
        )
    device = failure.device
    unplaced = failure.activity is None and failure.phase in (None, "load") and not failure.in_engine
    if unplaced and device is not None and device.asks_for_a_copy:
        return Diagnosis(
            FailureClass.MODEL_WEIGHTS,
            _COPY,
            f"One request was as large as all {human_bytes(device.allocated_bytes or 0)} of tensors on the GPU, like a "
            "second copy of the weights, such as a buffer of their gradients",
        )
    if not failure.is_of_the_gpu or failure.activity is not Activity.MODEL_LOAD:
        return None
    if device is None or device.allocated_bytes is None or not device.total_bytes:
        return Diagnosis(FailureClass.MODEL_WEIGHTS, 0.5, "The GPU was full while the model's weights were loaded")
    wanted = device.allocated_bytes + device.requested_bytes
    confidence = 0.75 if wanted >= _NEARLY_FULL * device.total_bytes else 0.5
    return Diagnosis(
        FailureClass.MODEL_WEIGHTS,
        confidence,
        f"While the model was loaded, {human_bytes(device.requested_bytes)} more did not fit beside the "
        f"{human_bytes(device.allocated_bytes)} of weights that were on the GPU of {human_bytes(device.total_bytes)}",
    )


def fills_the_gpu_with_weights(failure: Failure) -> bool:
    """True if an engine without a telling stack has filled the GPU by many small requests, and has no CUDA graphs yet.

    It keeps a part of the GPU free of its KV cache for activations, but does not bound its weights.
    """
    device = failure.device
    if failure.kind is not FailureKind.ALLOCATOR or not failure.in_engine or failure.activity or device is None:
        return False
    total, held = device.total_bytes or 0, (device.allocated_bytes or 0) - device.asleep_bytes
    return (
        0 < _FULL * total <= held and device.requested_bytes <= _SMALL_REQUEST * total and not device.private_pool_bytes
    )
