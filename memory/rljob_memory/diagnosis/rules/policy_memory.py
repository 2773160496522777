"""Rules for the memory of the policy: weights, optimizer state, activations."""

from __future__ import annotations

from rljob_api.memory_failure import Activity
from rljob_memory.diagnosis.classes import Diagnosis, FailureClass
from rljob_memory.diagnosis.growth import arrived_state
from rljob_memory.diagnosis.ledger import Ledger
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import DeviceMemory, Failure, FailureKind
from rljob_memory.sizes import human_bytes

# The weights do not fit: memory runs out while the model is loaded, built or moved to the GPU.
#
# At that time a process has neither activations nor optimizer state: its tensors are weights. An engine loads its
# weights before its cache is sized, so its share of the GPU does not matter either.

_MOSTLY_FULL = 0.6
"""Share of the GPU that the tensors and the request take together."""
_COPY = 0.65
_FULL = 0.98
_SMALL_LOAD_REQUEST = 0.01


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
    confidence = 0.75 if wanted >= _MOSTLY_FULL * device.total_bytes else 0.5
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
        0 < _FULL * total <= held
        and device.requested_bytes <= _SMALL_LOAD_REQUEST * total
        and not device.private_pool_bytes
    )


# The optimizer's state, created in the first step (8 bytes per parameter for Adam), and temporary copies of a step.
#
# The stack names torch.optim: in the first step it is the state itself; later, and in `_multi_tensor_*`, it is the
# temporary copies of the foreach implementation, as large as the parameters they work on. Or the first step went well
# and the second one, with the same shapes, finds the GPU full of tensors: what is new in it is the state.

_OF_THE_UPDATE = frozenset({Activity.FORWARD, Activity.BACKWARD, Activity.LOGITS})
_BY_ITS_STACK, _BY_ITS_STACK_ALONE = 0.8, 0.65
"""With torch's own message, and without it: pinning the state's memory on the host fails with the driver's message."""
_BY_ITS_SIZE, _OF_A_GUESS = 0.6, 0.4
_FULL_OF_TENSORS = 0.9
_SMALL_REQUEST = 0.1
"""Shares of the GPU: then the request is an ordinary one, and the tensors before it are the reason."""


def optimizer_state(failure: Failure, evidence: CollectedEvidence, ledger: Ledger) -> Diagnosis | None:
    if not failure.is_of_the_gpu:
        return None
    device = failure.device
    if failure.activity is Activity.OPTIMIZER:
        more = f" {human_bytes(device.requested_bytes)} more" if device else " more"
        in_use = (
            f" beside {human_bytes(device.allocated_bytes)} in tensors" if device and device.allocated_bytes else ""
        )
        of_torch = failure.kind is FailureKind.ALLOCATOR
        confidence = _BY_ITS_STACK if of_torch else _BY_ITS_STACK_ALONE
        return Diagnosis(
            FailureClass.OPTIMIZER_STATE, confidence, f"The optimizer's step asked for{more}{in_use}, which did not fit"
        )
    if not is_after_the_first_step(failure, evidence, ledger):
        return _by_its_size(ledger)
    state = _new_state(failure, evidence)
    allocated = device.allocated_bytes if device else None
    seen = (
        f"grew from {human_bytes(state[0])} to {human_bytes(state[1])} in the first step, which creates the "
        "optimizer's state"
        if state
        else f"were {human_bytes(allocated or 0)} in the second step; the first one, without the optimizer's state, fit"
    )
    return Diagnosis(FailureClass.OPTIMIZER_STATE, 0.7 if state else 0.6, f"Tensors {seen}")


def _by_its_size(ledger: Ledger) -> Diagnosis | None:
    """The tensors are what weights, gradients and Adam's state take together: nothing else is there to make smaller."""
    expected, activity = ledger.expected, ledger.failure.activity
    if expected is None or not ledger.is_full_of_state or (activity is not None and activity not in _OF_THE_UPDATE):
        return None
    return Diagnosis(
        FailureClass.OPTIMIZER_STATE,
        _OF_A_GUESS if expected.is_guess else _BY_ITS_SIZE,
        f"{human_bytes(ledger.tensors_bytes)} of tensors are about what {expected.parameters / 1e9:.2f} billion "
        f"parameters take: weights {human_bytes(expected.weights_bytes)}, gradients "
        f"{human_bytes(expected.gradients_bytes)}, Adam's state {human_bytes(expected.optimizer_bytes)}",
        {"expected_bytes": expected.training_bytes},
    )


def is_after_the_first_step(failure: Failure, evidence: CollectedEvidence, ledger: Ledger) -> bool:
    """True if one step fit, and the GPU is full of tensors in the next, in an ordinary request of the policy."""
    device = failure.device
    if device is None or not device.total_bytes or device.allocated_bytes is None or failure.in_engine:
        return False
    if failure.activity is not None and failure.activity not in _OF_THE_UPDATE:
        return False
    if device.requested_bytes > _SMALL_REQUEST * device.total_bytes or ledger.engine_kv_cache_bytes:
        return False
    if _new_state(failure, evidence):
        return True
    return failure.steps_done == 1 and device.allocated_bytes >= _FULL_OF_TENSORS * device.total_bytes


def _new_state(failure: Failure, evidence: CollectedEvidence) -> tuple[int, int] | None:
    """Memory in tensors before and after the optimizer created its state, if the samples show it."""
    total = failure.device.total_bytes if failure.device else None
    states = [arrived_state(series, total or 0) for series in evidence.series if series.is_policy and total]
    return next((state for state in states if state), None)


# A forward or backward pass needs more memory than is left: logits, log-probabilities, attention, activations.
#
# The stack shows which pass it was. A single request of a quarter of the card is one tensor of that size, and in a
# language model's training only logits ([tokens, vocabulary] in float32), their gradient or an attention matrix are.

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
    if failure.kind is FailureKind.COMPILED:
        return _diagnosis(failure, _BY_THE_COMPILER, "the compiler knew it in advance")
    if device is None:
        if failure.activity not in _BY_ACTIVITY:
            return None
        confidence = _BY_ACTIVITY[failure.activity] / 2
        return _diagnosis(failure, confidence, "the GPU was full")
    if device.had_room and (device.free_bytes or 0) >= _MUCH_FREE * (device.total_bytes or 0):
        return None
    confidence = _BY_ACTIVITY.get(failure.activity, 0.0) if failure.activity else 0.0
    if failure.phase == "update":
        confidence = max(confidence, 0.55)
    confidence = max(confidence, _by_numbers(device, in_the_policy=failure.role == "policy"))
    if ledger.asks_for_logits and failure.activity in (None, Activity.FORWARD, Activity.BACKWARD):
        failure = failure.model_copy(update={"activity": Activity.LOGITS})
        confidence = max(confidence, _AS_LARGE_AS_LOGITS)
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
