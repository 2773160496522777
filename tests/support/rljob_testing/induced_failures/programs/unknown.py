"""Failures without numbers and without a place, from which no cause can be inferred."""

from __future__ import annotations

from pathlib import Path

import torch

from rljob_memory.diagnosis import FailureClass
from rljob_testing.ballast import LARGEST_CHUNK_BYTES, CudaDriver, ballast
from rljob_testing.induced_failures.card import gib, take_card, take_turn
from rljob_testing.induced_failures.catalogue import induces


@induces(FailureClass.UNKNOWN)
def a_request_past_torch(folder: Path) -> None:
    """A library calls the CUDA driver directly, beside tensors that fill the GPU."""
    tensors = [gib(1) for _ in range(int(take_card().free_gib) - 1)]
    CudaDriver().allocate(4 * LARGEST_CHUNK_BYTES)
    del tensors


@induces(FailureClass.UNKNOWN)
def a_context_on_a_full_card(folder: Path) -> None:
    """A process starts on a full GPU: not even its CUDA context fits."""
    take_turn()
    with ballast(leave_bytes=64 << 20):
        torch.zeros(1, device="cuda")
