"""The process may use a part of the GPU, and reaches that limit while the rest of the GPU is free."""

from __future__ import annotations

from pathlib import Path

import torch

from rljob_memory.diagnosis import FailureClass
from rljob_testing.induced_failures.card import GIB, floats, take_card
from rljob_testing.induced_failures.catalogue import induces

_FRACTION = 0.3


@induces(FailureClass.GPU_MEMORY_LIMIT)
def a_fraction_set_by_the_program(folder: Path) -> None:
    """`set_per_process_memory_fraction`, as a service does that shares the GPU with others."""
    card = take_card()
    torch.cuda.set_per_process_memory_fraction(_FRACTION)
    _fill(card.total_bytes)


@induces(
    FailureClass.GPU_MEMORY_LIMIT, variables={"PYTORCH_CUDA_ALLOC_CONF": f"per_process_memory_fraction:{_FRACTION}"}
)
def a_fraction_set_in_the_environment(folder: Path) -> None:
    """The same limit, from the variable that torch 2.10 and newer read."""
    _fill(take_card().total_bytes)


def _fill(total_bytes: int) -> None:
    """Allocate tensors of 1 GiB until one fails, or the limit turns out not to be in force."""
    kept = [floats(GIB) for _ in range(int(total_bytes * (_FRACTION + 0.1) / GIB))]
    raise AssertionError(f"{len(kept)} GiB were allocated: the limit is not in force")
