"""A forward or backward pass needs more memory than is left: logits, log-probabilities, attention, activations.

The stack shows which pass it was. A single request of a quarter of the card is one tensor of that size, and in a
language model's training only logits ([tokens, vocabulary] in float32), their gradient or an attention matrix are.
"""

from __future__ import annotations

from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.diagnosis.diagnosis import Diagnosis
from rljob_memory.diagnosis.gpu_holders import foreign_bytes
from rljob_memory.diagnosis.growth import allocated_growth
from rljob_memory.evidence.activity import Activity
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import DeviceMemory, Failure, FailureKind
from rljob_memory.sizes import human_bytes

_BY_ACTIVITY = {Activity.LOGITS: 0.8, Activity.BACKWARD: 0.65, Activity.FORWARD: 0.6, Activity.GENERATION: 0.4}
_OTHER_CAUSES = frozenset(Activity) - set(_BY_ACTIVITY)
_HUGE_SHARE = 0.25
_NEARLY_FULL = 0.75


def activation_spike(failure: Failure, evidence: CollectedEvidence) -> Diagnosis | None:
    device = failure.device
    if failure.kind not in (FailureKind.ALLOCATOR, FailureKind.DRIVER) or failure.activity in _OTHER_CAUSES:
        return None
    if device is None:
        if failure.activity not in _BY_ACTIVITY:
            return None
        return _diagnosis(failure, _BY_ACTIVITY[failure.activity] / 2, "the GPU was full")
    confidence = _BY_ACTIVITY.get(failure.activity, 0.0) if failure.activity else 0.0
    if failure.phase == "update":
        confidence = max(confidence, 0.55)
    confidence = max(confidence, _by_numbers(device))
    if any(series.is_policy and allocated_growth(series) for series in evidence.series):
        # Then chance decides which pass finds the card full.
        confidence = min(confidence, 0.5)
    if foreign_bytes(failure) > (device.allocated_bytes or 0):
        confidence = min(confidence, 0.4)
    if not confidence:
        return None
    in_use = f", {human_bytes(device.allocated_bytes)} were in tensors" if device.allocated_bytes is not None else ""
    return _diagnosis(failure, confidence, f"{human_bytes(device.requested_bytes)} more did not fit{in_use}")


def _by_numbers(device: DeviceMemory) -> float:
    if not device.total_bytes:
        return 0.0
    if device.requested_bytes >= device.total_bytes:
        return 0.7
    if device.requested_bytes >= _HUGE_SHARE * device.total_bytes:
        return 0.6
    nearly_full = (device.allocated_bytes or 0) >= _NEARLY_FULL * device.total_bytes
    return 0.4 if nearly_full else 0.0


def _diagnosis(failure: Failure, confidence: float, what: str) -> Diagnosis:
    of = "Logits or log-probabilities" if failure.activity is Activity.LOGITS else "The pass through the model"
    return Diagnosis(
        FailureClass.ACTIVATION_SPIKE, round(confidence, 2), f"{of} needed more memory than was left: {what}"
    )
