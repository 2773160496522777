"""A forward or backward pass needs more memory than is left: logits, log-probabilities, attention, activations.

The stack shows which pass it was. A single request of a quarter of the card is one tensor of that size, and in a
language model's training only logits ([tokens, vocabulary] in float32), their gradient or an attention matrix are.
"""

from __future__ import annotations

from dataclasses import replace

from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.diagnosis.diagnosis import Diagnosis
from rljob_memory.diagnosis.ledger import Ledger
from rljob_memory.evidence.activity import Activity
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import DeviceMemory, Failure
from rljob_memory.evidence.signatures import COMPILED
from rljob_memory.sizes import human_bytes

_BY_ACTIVITY = {
    Activity.LOGITS: 0.8,
    Activity.BACKWARD: 0.65,
    Activity.FORWARD: 0.6,
    Activity.SAMPLING: 0.6,
    Activity.GENERATION: 0.55,
    Activity.ENGINE_STEP: 0.4,
}
_AN_ENGINES_SHARE = 0.5
"""Most confidence in an engine: it divides its share of the GPU itself."""
_LARGE_LOGITS = 0.05
"""Share of the GPU: in an engine, log-probabilities of whole prompts, which no share foresees."""
_LARGEST_PASS = 0.7
_ITS_START = frozenset({Activity.ENGINE_PROFILING, Activity.ENGINE_WARM_UP})
_LARGE_REQUEST = 0.1
"""Share of the GPU that one tensor of the profiling pass takes, if the log does not show the weights."""
_MOSTLY_WEIGHTS = 0.7
"""Share of weights in the tensors of an engine whose profiling pass has hardly begun."""
_OTHER_CAUSES = frozenset(Activity) - set(_BY_ACTIVITY)
_AS_LARGE_AS_LOGITS = 0.7
_HUGE_SHARE = 0.25
_HUGE = 0.6
_HUGE_COPY = 0.4
"""It is as large as all tensors, so it is rather a second copy of them."""
_EMPTY_SHARE = 0.005
_MUCH_FREE = 0.25
"""Share of the GPU that was free: then a small request failed for another reason than its size."""
_BY_THE_COMPILER = 0.7
_NEARLY_FULL = 0.75


def activation_spike(failure: Failure, evidence: CollectedEvidence, ledger: Ledger) -> Diagnosis | None:
    device = failure.device
    if _fails_in_its_largest_pass(failure, evidence):
        return _diagnosis(failure, _LARGEST_PASS, "the engine tried its largest batch before it has a KV cache")
    if not failure.is_of_the_gpu or failure.activity in _OTHER_CAUSES:
        return None
    if failure.exceeds_every_gpu and not (device and device.total_bytes):
        asked = human_bytes(failure.requested_bytes or 0)
        return _diagnosis(failure, _HUGE, f"it asked for {asked} at once, more than GPUs have")
    if device is None:
        if failure.activity not in _BY_ACTIVITY:
            return None
        confidence = _BY_THE_COMPILER if COMPILED.search(failure.text) else _BY_ACTIVITY[failure.activity] / 2
        return _diagnosis(failure, confidence, "the GPU was full")
    if device.had_room and (device.free_bytes or 0) >= _MUCH_FREE * (device.total_bytes or 0):
        return None
    confidence = _BY_ACTIVITY.get(failure.activity, 0.0) if failure.activity else 0.0
    if failure.phase == "update":
        confidence = max(confidence, 0.55)
    confidence = max(confidence, _by_numbers(device, in_the_policy=failure.role == "policy"))
    if ledger.asks_for_logits and failure.activity in (None, Activity.FORWARD, Activity.BACKWARD):
        failure, confidence = replace(failure, activity=Activity.LOGITS), max(confidence, _AS_LARGE_AS_LOGITS)
    large_logits = failure.activity is Activity.LOGITS and device.requested_bytes >= _LARGE_LOGITS * (
        device.total_bytes or device.requested_bytes + 1
    )
    if failure.in_engine and not large_logits:
        confidence = min(confidence, _AN_ENGINES_SHARE)
    if not confidence:
        return None
    in_use = f", {human_bytes(device.allocated_bytes)} were in tensors" if device.allocated_bytes is not None else ""
    return _diagnosis(failure, confidence, f"{human_bytes(device.requested_bytes)} more did not fit{in_use}")


def _fails_in_its_largest_pass(failure: Failure, evidence: CollectedEvidence) -> bool:
    """True if an engine's profiling pass, which comes before the KV cache, filled the GPU beside its weights."""
    engine, device = evidence.engine, failure.device
    if failure.activity not in _ITS_START or device is None or engine.kv_cache_bytes is not None:
        return False
    if not engine.weights_bytes:
        large = device.requested_bytes >= _LARGE_REQUEST * (device.total_bytes or device.requested_bytes + 1)
        return large and failure.activity is Activity.ENGINE_PROFILING
    return engine.weights_bytes < _MOSTLY_WEIGHTS * (device.allocated_bytes or 0)


def _by_numbers(device: DeviceMemory, in_the_policy: bool) -> float:
    """Confidence without a stack. A full GPU alone shows no pass: weights and optimizer state fill it as well."""
    if not device.total_bytes:
        return 0.0
    if device.allocated_bytes is not None and device.allocated_bytes < _EMPTY_SHARE * device.total_bytes:
        return 0.0  # A pass needs weights on the GPU: nothing was there yet.
    if device.requested_bytes >= device.total_bytes:
        return 0.7
    if device.requested_bytes >= _HUGE_SHARE * device.total_bytes:
        return _HUGE_COPY if device.asks_for_a_copy else _HUGE
    nearly_full = (device.allocated_bytes or 0) - device.asleep_bytes >= _NEARLY_FULL * device.total_bytes
    return 0.4 if nearly_full and in_the_policy else 0.0


def _diagnosis(failure: Failure, confidence: float, what: str) -> Diagnosis:
    of = "Logits or log-probabilities" if failure.activity is Activity.LOGITS else "The pass through the model"
    return Diagnosis(
        FailureClass.ACTIVATION_SPIKE, round(confidence, 2), f"{of} needed more memory than was left: {what}"
    )
