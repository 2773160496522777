"""The ways in which a policy rank keeps out of its neighbour's memory, each with one place where it is used."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def allocator_settings(inherited: str, *, expandable_segments: bool) -> str:
    """The allocator's whole settings string: the inherited one with `expandable_segments` set.

    Whole, since each call that sets some of the allocator's options resets others to their defaults.
    """
    kept = [part for part in inherited.split(",") if part and not part.strip().startswith("expandable_segments")]
    return ",".join([*kept, f"expandable_segments:{expandable_segments}"])


def set_expandable_segments(enabled: bool) -> None:
    """Let the allocator's segments grow, or not; memory that is already handed out stays as it is."""
    settings = allocator_settings(os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""), expandable_segments=enabled)
    # The first is the name since torch 2.10, the second that of the versions before. Neither is public.
    if hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        torch._C._accelerator_setAllocatorSettings(settings)
    else:
        torch.cuda.memory._set_allocator_settings(settings)


@contextmanager
def classic_segments(*, expandable_segments: bool) -> Iterator[None]:
    """Within, new GPU memory is plain cudaMalloc, which CUDA IPC can export from an unprivileged container.

    `expandable_segments`: whether they are in use outside, and so to be restored. What is exported must be allocated
    within: tensors from before stay where they are.
    """
    if not expandable_segments:
        yield
        return
    set_expandable_segments(False)
    # The free part of expandable segments cannot be used while they are off: hand it back rather than strand it.
    torch.cuda.empty_cache()
    try:
        yield
    finally:
        set_expandable_segments(True)


@contextmanager
def optimizer_on_device(optimizer: torch.optim.Optimizer, device: torch.device, *, offload: bool) -> Iterator[None]:
    """Within, the optimizer's state is on `device`; outside it is in host memory, where `offload`."""
    if not offload:
        yield
        return
    _move_optimizer_state(optimizer, device)
    try:
        yield
    finally:
        _move_optimizer_state(optimizer, torch.device("cpu"))


def release_cached_memory() -> None:
    """Hand what the allocator caches back to the device, where the engine needs it."""
    gc.collect(generation=0)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def release_exported_memory() -> None:
    """Give memory back whose handles other processes had, once they have let go of it.

    Left to the allocator, each export would strand another buffer: a small tensor that moves into it keeps it for good.
    """
    gc.collect(generation=0)
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()


def _move_optimizer_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                state[name] = value.to(device)
