"""The process has a limit below the GPU's memory: a fraction set in torch, or a share of the GPU set from outside.

torch's message names the limit (`1.50 GiB allowed`), and raises although the driver has memory left. Libraries that
share a GPU among pods (HAMi, MPS) answer requests past the limit as if the GPU were full.
"""

from __future__ import annotations

from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.diagnosis.diagnosis import Diagnosis
from rljob_memory.diagnosis.ledger import Ledger
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import Failure, FailureKind
from rljob_memory.sizes import human_bytes

_BELOW_THE_GPU = 0.99
"""A limit of nearly all memory is none: torch names it even if the fraction is 1."""
_AT_THE_LIMIT = 0.98
_MOST_OF_THE_GPU = 0.9
"""A limit above this share leaves little to gain."""


def gpu_memory_limit(failure: Failure, evidence: CollectedEvidence, ledger: Ledger) -> Diagnosis | None:
    if failure.kind is FailureKind.LIMIT:
        limit = failure.sizes.get("limit_bytes")
        of = f" of {human_bytes(limit)}" if limit else ""
        return Diagnosis(FailureClass.GPU_MEMORY_LIMIT, 0.9, f"The process reached its limit{of} of GPU memory")
    device = failure.device
    if device is None or device.allowed_bytes is None:
        return None
    if device.total_bytes and device.allowed_bytes >= _BELOW_THE_GPU * device.total_bytes:
        return None
    known = (device.reserved_bytes, device.allocated_bytes, device.process_bytes)
    held = next((nbytes for nbytes in known if nbytes is not None), None)
    if held is None or held + device.requested_bytes < _AT_THE_LIMIT * device.allowed_bytes:
        return None
    had_room = device.free_bytes is not None and device.free_bytes >= device.requested_bytes
    return Diagnosis(
        FailureClass.GPU_MEMORY_LIMIT,
        0.9 if had_room and device.allowed_bytes < _MOST_OF_THE_GPU * (device.total_bytes or 0) else 0.6,
        f"The process may use {human_bytes(device.allowed_bytes)} of the GPU's "
        f"{human_bytes(device.total_bytes or 0)}, held {human_bytes(held)} and asked for "
        f"{human_bytes(device.requested_bytes)}"
        + (f", although {human_bytes(device.free_bytes or 0)} of the GPU were free" if had_room else ""),
    )
