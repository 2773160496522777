"""The optimizer's state, created in the first step (8 bytes per parameter for Adam), and temporary copies of a step.

The stack names torch.optim: in the first step it is the state itself; later, and in `_multi_tensor_*`, it is the
temporary copies of the foreach implementation, as large as the parameters they work on. Or the first step went well and
the second one, with the same shapes, finds the GPU full of tensors: what is new in it is the state.
"""

from __future__ import annotations

from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.diagnosis.diagnosis import Diagnosis
from rljob_memory.diagnosis.growth import arrived_state
from rljob_memory.diagnosis.ledger import Ledger
from rljob_memory.evidence.activity import Activity
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import Failure, FailureKind
from rljob_memory.sizes import human_bytes

_OF_THE_UPDATE = frozenset({Activity.FORWARD, Activity.BACKWARD, Activity.LOGITS})
_BY_ITS_STACK, _BY_ITS_STACK_ALONE = 0.8, 0.65
"""With torch's own message, and without it: pinning the state's memory on the host fails with the driver's words."""
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
    state = new_state(failure, evidence)
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
    if new_state(failure, evidence):
        return True
    return failure.steps_done == 1 and device.allocated_bytes >= _FULL_OF_TENSORS * device.total_bytes


def new_state(failure: Failure, evidence: CollectedEvidence) -> tuple[int, int] | None:
    """Memory in tensors before and after the optimizer created its state, if the samples show it."""
    total = failure.device.total_bytes if failure.device else None
    states = [arrived_state(series, total or 0) for series in evidence.series if series.is_policy and total]
    return next((state for state in states if state), None)
