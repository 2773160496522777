"""Causes in the last request: weights, optimizer state, activations, copies of the weights."""

from __future__ import annotations

from rljob_api.memory_failure import Activity, DeviceMemory, FailureKind
from rljob_memory.diagnosis.balance import Balance
from rljob_memory.diagnosis.causes.finding import Finding, Weight
from rljob_memory.sizes import human_bytes

_MOSTLY_FULL = 0.6
"""Share of the GPU from which a single request is strong evidence."""
_UPDATE_ACTIVITIES = frozenset({Activity.FORWARD, Activity.BACKWARD, Activity.LOGITS})
_FULL_OF_TENSORS = 0.9
"""Share of the GPU from which tensors fill it."""
_SMALL_REQUEST = 0.1
"""Shares of the GPU: then the request is an ordinary one, and the tensors before it are the reason."""


def model_weights(balance: Balance) -> Finding | None:
    """The weights do not fit: memory runs out while the model is loaded, built or moved to the GPU."""
    failure, device = balance.failure, balance.device
    if balance.weights_fill_the_engine:
        full = "The engine's tensors fill the whole GPU, beyond any share for its KV cache, before it has CUDA graphs"
        return Finding(Weight.POSSIBLE, full, balance.tensors_bytes)
    unplaced = failure.activity is None and failure.phase is None and not failure.in_engine
    if unplaced and device is not None and device.asks_for_a_copy:
        held = human_bytes(device.allocated_bytes or 0)
        return Finding(
            Weight.LIKELY,
            f"One request was as large as all {held} of tensors on the GPU, like a second copy of the weights, such as "
            "a buffer of their gradients",
            device.requested_bytes,
        )
    if not failure.is_of_the_gpu or failure.activity is not Activity.MODEL_LOAD:
        return None
    if device is None or device.allocated_bytes is None or not device.total_bytes:
        return Finding(Weight.POSSIBLE, "The GPU was full while the model's weights were loaded")
    wanted = device.allocated_bytes + device.requested_bytes
    return Finding(
        Weight.STRONG if balance.share(wanted) >= _MOSTLY_FULL else Weight.POSSIBLE,
        f"While the model was loaded, {human_bytes(device.requested_bytes)} more did not fit next to the "
        f"{human_bytes(device.allocated_bytes)} of weights that were on the GPU of {human_bytes(device.total_bytes)}",
        device.requested_bytes,
    )


def optimizer_state(balance: Balance) -> Finding | None:
    """The optimizer's state, created in the first step (8 bytes per parameter for Adam), and copies during a step.

    Without the stack: one step fit, and the GPU is full of tensors in the next; or the tensors are what weights,
    gradients and state of the model take.
    """
    failure, device = balance.failure, balance.device
    if not failure.is_of_the_gpu:
        return None
    if failure.activity is Activity.OPTIMIZER:
        more = f" {human_bytes(device.requested_bytes)} more" if device else " more"
        held = f" next to {human_bytes(device.allocated_bytes)} in tensors" if device and device.allocated_bytes else ""
        weight = Weight.STRONG if failure.kind is FailureKind.ALLOCATOR else Weight.LIKELY
        return Finding(
            weight, f"The optimizer's step asked for{more}{held}, which did not fit", balance.requested_bytes
        )
    if is_after_the_first_step(balance):
        held = human_bytes(balance.tensors_bytes)
        seen = f"were {held} in the second step; the first one, without the optimizer's state, fit"
        return Finding(Weight.LIKELY, f"Tensors {seen}", balance.tensors_bytes)
    expected = balance.expected
    in_update = failure.activity is None or failure.activity in _UPDATE_ACTIVITIES
    if expected is None or not balance.is_full_of_state or not in_update:
        return None
    return Finding(
        Weight.FAINT if expected.is_guess else Weight.LIKELY,
        f"{human_bytes(balance.tensors_bytes)} of tensors are about what {expected.parameters / 1e9:.2f} billion "
        f"parameters take: weights {human_bytes(expected.weights_bytes)}, gradients "
        f"{human_bytes(expected.gradients_bytes)}, Adam's state {human_bytes(expected.optimizer_bytes)}",
        expected.optimizer_bytes,
        {"expected_bytes": expected.training_bytes},
    )


def is_after_the_first_step(balance: Balance) -> bool:
    """True if one step fit, and the GPU is full of tensors in the next, in an ordinary request of the policy."""
    failure, device = balance.failure, balance.device
    if device is None or not device.total_bytes or device.allocated_bytes is None or failure.in_engine:
        return False
    if failure.activity is not None and failure.activity not in _UPDATE_ACTIVITIES:
        return False
    if balance.share(device.requested_bytes) > _SMALL_REQUEST or balance.engine_kv_cache_bytes:
        return False
    return failure.steps_done == 1 and balance.share(device.allocated_bytes) >= _FULL_OF_TENSORS


_PASSES = {
    Activity.LOGITS: Weight.STRONG,
    Activity.BACKWARD: Weight.LIKELY,
    Activity.FORWARD: Weight.LIKELY,
    Activity.SAMPLING: Weight.LIKELY,
    Activity.GENERATION: Weight.POSSIBLE,
    Activity.ENGINE_STEP: Weight.FAINT,
}
ITS_START = frozenset({Activity.ENGINE_PROFILING, Activity.ENGINE_WARM_UP})
_LARGE_LOGITS = 0.05
"""Share of the GPU: in an engine, log-probabilities of whole prompts, which no share foresees."""
_MOSTLY_WEIGHTS = 0.7
"""Share of weights in the tensors of an engine whose profiling pass has hardly begun."""
_HUGE_SHARE = 0.25
_EMPTY_SHARE = 0.005
_MUCH_FREE = 0.25
"""Share of the GPU that was free: then a small request failed for another reason than its size."""
_NEARLY_FULL = 0.75
"""Share of the GPU from which tensors nearly fill it."""


def activation_spike(balance: Balance) -> Finding | None:
    """A forward or backward pass needs more memory than is left: logits, log-probabilities, attention, activations.

    A single request of a quarter of the GPU is one tensor of that size, and in a language model's training only logits,
    their gradient or an attention matrix are.
    """
    failure, device = balance.failure, balance.device
    activity = failure.activity
    if failure.kind is FailureKind.COMPILED:
        return _of_a_pass(balance, Weight.LIKELY, "the compiler knew it in advance")
    if _fails_in_its_largest_pass(balance):
        return _of_a_pass(balance, Weight.STRONG, "the engine tried its largest batch before it has a KV cache")
    if not failure.is_of_the_gpu or (activity is not None and activity not in _PASSES):
        return None
    if failure.exceeds_every_gpu and not balance.total_bytes:
        asked = human_bytes(balance.requested_bytes)
        return _of_a_pass(balance, Weight.LIKELY, f"it asked for {asked} at once, more than GPUs have")
    if device is None:
        return _of_a_pass(balance, Weight.FAINT, "the GPU was full") if activity else None
    if device.had_room and balance.share(device.free_bytes or 0) >= _MUCH_FREE:
        return None
    weight = max(_PASSES[activity] if activity else 0, _by_numbers(balance, device))
    if failure.phase == "update":
        weight = max(weight, Weight.POSSIBLE)
    logits = activity is Activity.LOGITS or (balance.asks_for_logits and activity is not Activity.SAMPLING)
    if balance.asks_for_logits:
        weight = max(weight, Weight.LIKELY)
    if failure.in_engine and not (logits and balance.share(device.requested_bytes) >= _LARGE_LOGITS):
        weight = min(weight, Weight.POSSIBLE)
    if not weight:
        return None
    held = f", {human_bytes(device.allocated_bytes)} were in tensors" if device.allocated_bytes is not None else ""
    what = f"{human_bytes(device.requested_bytes)} more did not fit{held}"
    return _of_a_pass(balance, Weight(weight), what, logits=logits)


def _by_numbers(balance: Balance, device: DeviceMemory) -> int:
    """Weight without a stack. A full GPU alone shows no pass: weights and optimizer state fill it as well."""
    if not balance.total_bytes:
        return 0
    if device.allocated_bytes is not None and balance.share(device.allocated_bytes) < _EMPTY_SHARE:
        return 0  # a pass needs weights on the GPU: nothing was there yet
    if balance.share(device.requested_bytes) >= _HUGE_SHARE:
        return Weight.FAINT if device.asks_for_a_copy and balance.share(device.requested_bytes) < 1 else Weight.LIKELY
    nearly_full = balance.share((device.allocated_bytes or 0) - device.asleep_bytes) >= _NEARLY_FULL
    return Weight.FAINT if nearly_full and balance.failure.role == "policy" else 0


def _fails_in_its_largest_pass(balance: Balance) -> bool:
    """True if an engine's profiling pass, which comes before the KV cache, filled the GPU next to its weights."""
    failure, engine, device = balance.failure, balance.evidence.engine, balance.device
    if failure.activity not in ITS_START or device is None or engine.kv_cache_bytes is not None:
        return False
    if not engine.weights_bytes:
        large = device.requested_bytes >= _SMALL_REQUEST * (device.total_bytes or device.requested_bytes + 1)
        return large and failure.activity is Activity.ENGINE_PROFILING
    return engine.weights_bytes < _MOSTLY_WEIGHTS * (device.allocated_bytes or 0)


def _of_a_pass(balance: Balance, weight: Weight, what: str, *, logits: bool = False) -> Finding:
    of = "Logits or log-probabilities" if logits else "The pass through the model"
    return Finding(weight, f"{of} needed more memory than was left: {what}", balance.requested_bytes)


_COPIES = {
    Activity.WEIGHT_SYNC: (Weight.STRONG, "The copies of the weights for the engine"),
    Activity.GATHERING: (Weight.LIKELY, "The full parameters, gathered from all ranks,"),
    Activity.CHECKPOINT: (Weight.POSSIBLE, "The copies of the weights for a checkpoint"),
}


def weight_sync_spike(balance: Balance) -> Finding | None:
    """Sending the weights to the engine needs full copies of them for a moment (verl 6729 and 6772, SkyRL 1623). Saving
    a checkpoint gathers the weights in the same way (SkyRL 70), and looks the same in memory."""
    failure, device = balance.failure, balance.device
    if not failure.is_of_the_gpu and failure.kind not in (FailureKind.NCCL, FailureKind.ENGINE_WAKE):
        return None
    known = _COPIES.get(failure.activity) if failure.activity else None
    weight, what = known or (Weight.STRONG if failure.phase == "sync" else None, _COPIES[Activity.WEIGHT_SYNC][1])
    if failure.kind is FailureKind.ENGINE_WAKE:
        # While the engine wakes, its own memory fails; the copies are at most in the way.
        weight = Weight.POSSIBLE if failure.phase == "sync" else None
    elif failure.phase == "sync":
        weight = Weight.STRONG
    if weight is None:
        return None
    more = f": {human_bytes(device.requested_bytes)} more did not fit" if device else ""
    return Finding(weight, f"{what} did not fit next to the memory in use{more}", balance.requested_bytes)
