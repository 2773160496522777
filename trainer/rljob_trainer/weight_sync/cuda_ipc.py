"""Memory of a process that another process on the same GPU reads: CUDA IPC, by calls of the driver.

torch's own functions count the readers of every tensor in files and CUDA events, which takes longer than to copy the
tensor, and never free memory that was opened twice. Here the owner keeps the memory while others read it, and they
close what they have opened. The driver exports whole allocations, and only those of cudaMalloc (classic segments).
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rljob_client.errors import RunError

_LAZY_PEER_ACCESS = 1
"""The only flag of cuIpcOpenMemHandle."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(function: str, *arguments: Any) -> None:
    if code := getattr(_driver(), function)(*arguments):
        raise RunError(
            f"expected to share GPU memory between policy and engine, {function} failed with CUDA error {code}"
        )


def gpu_of(device: torch.device) -> str:
    """The UUID of a GPU, which all processes know it by."""
    return str(torch.cuda.get_device_properties(device).uuid)


def shared(tensors: Iterable[Tensor]) -> dict[str, Any]:
    """The places of contiguous tensors of any shape on a GPU, for `OpenedMemory.parts`; no memory is copied.

    Raises `RunError` for a tensor in an expandable segment.
    """
    torch.cuda.current_stream().synchronize()  # the content is there, and the driver knows this thread's GPU
    handles: list[bytes] = []
    indices: dict[int, int] = {}
    places = []
    for tensor in tensors:
        assert tensor.is_contiguous()
        first = ctypes.c_uint64()
        _call("cuMemGetAddressRange_v2", ctypes.byref(first), None, ctypes.c_uint64(tensor.data_ptr()))
        if first.value not in indices:
            handle = _Handle()
            _call("cuIpcGetMemHandle", ctypes.byref(handle), first)
            indices[first.value] = len(handles)
            handles.append(bytes(handle))
        places.append((indices[first.value], tensor.data_ptr() - first.value))
    return {"gpu": gpu_of(torch.device("cuda")), "handles": handles, "places": places}


class OpenedMemory:
    """Memory of another process that this one has opened. An allocation is opened once, and used until `close`."""

    def __init__(self) -> None:
        self._addresses: dict[bytes, int] = {}

    def parts(self, handles: Sequence[bytes], places: Sequence[tuple[int, int]], sizes: Sequence[int]) -> list[Tensor]:
        """The tensors at `places`, each [bytes] uint8: index of the handle, and bytes from the start of its memory."""
        torch.cuda.current_stream().synchronize()  # the driver knows this thread's GPU
        addresses = [self._opened(handle) for handle in handles]
        return [
            torch.as_tensor(_Bytes(addresses[index] + offset, size), device="cuda")
            for (index, offset), size in zip(places, sizes, strict=True)
        ]

    def close(self, kept: Collection[bytes] = ()) -> None:
        """Close all memory but that of the handles `kept`. Tensors in it are unusable afterwards."""
        for handle in [handle for handle in self._addresses if handle not in kept]:
            _call("cuIpcCloseMemHandle", ctypes.c_uint64(self._addresses.pop(handle)))

    def _opened(self, handle: bytes) -> int:
        if handle not in self._addresses:
            address = ctypes.c_uint64()
            value = _Handle.from_buffer_copy(handle)
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), value, ctypes.c_uint(_LAZY_PEER_ACCESS))
            self._addresses[handle] = address.value
        return self._addresses[handle]


class _Bytes:
    """GPU memory at an address, as torch reads it without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
