"""Large arrays in host memory that a GPU copies from and to at full speed."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

_FILL_BYTES = 1 << 30
_FILLING_THREADS = 8


class HostArray:
    """A one-dimensional tensor of zeros in host memory, pinned for a GPU.

    One mapping and one registration with CUDA: torch's own pinned memory is rounded up to powers of two. Memory is
    taken in the background, since touching 64 GiB for the first time takes seconds; `tensor` waits for it.
    """

    def __init__(self, elements: int, dtype: torch.dtype, *, pinned: bool, purpose: str, advice: str) -> None:
        """`purpose`, `advice`: for the message if the memory is refused, such as "the optimizer's state", "write …"."""
        self.nbytes = elements * dtype.itemsize
        self._tensor: Future[Tensor] = Future()
        if not pinned or not elements:
            self._tensor.set_result(torch.zeros(elements, dtype=dtype))
            return
        executor = ThreadPoolExecutor(1, thread_name_prefix="host-array")
        self._tensor = executor.submit(_pinned_zeros, elements, dtype, purpose, advice)
        executor.shutdown(wait=False)
        weakref.finalize(self, _unregister, self._tensor)

    @property
    def tensor(self) -> Tensor:
        """The array, [elements]. Raises `RuntimeError` if the host's memory could not be taken or pinned."""
        return self._tensor.result()


_ALIGNMENT = 512
"""Bytes, so that numbers of any dtype can be viewed at the beginning of each part."""


def parts_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of memory that `parts_like` needs for tensors of these shapes."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def parts_like(tensors: Iterable[Tensor], memory: Tensor) -> list[Tensor]:
    """Parts of `memory` (uint8, [bytes]), one after the other, with the shapes and dtypes of `tensors`."""
    parts, start = [], 0
    for tensor in tensors:
        parts.append(memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += _aligned(tensor.nbytes)
    return parts


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _pinned_zeros(elements: int, dtype: torch.dtype, purpose: str, advice: str) -> Tensor:
    nbytes = elements * dtype.itemsize
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise RuntimeError(
            f"expected {nbytes / 2**30:.1f} GiB of host memory for {purpose}, the system refuses: {error}; "
            f"give the worker more memory, or {advice}"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=dtype)
    parts = tensor.view(torch.uint8).split(_FILL_BYTES)
    with ThreadPoolExecutor(min(_FILLING_THREADS, os.cpu_count() or 1)) as threads:
        list(threads.map(Tensor.zero_, parts))
    if code := int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), nbytes, 0)):
        raise RuntimeError(
            f"expected CUDA to pin {nbytes / 2**30:.1f} GiB of host memory for {purpose}, it returned "
            f"error {code}; raise the limit of locked memory (ulimit -l), or {advice}"
        )
    return tensor


def _unregister(tensor: Future[Tensor]) -> None:
    if tensor.exception() is None:
        torch.cuda.cudart().cudaHostUnregister(tensor.result().data_ptr())
