"""GPU memory of this process beside torch's allocator: the CUDA context, NCCL, cuBLAS, loaded kernels."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any


class OutsideTorch:
    """Create it before this process touches its GPU: memory in use by then counts as that of other processes."""

    def __init__(self) -> None:
        self._handle = first_visible_gpu()
        self._used_by_others = _used_bytes(self._handle)
        self._calibrated: int | None = None

    def measure(self, held_bytes: int) -> int:
        """Bytes in use now. `held_bytes`: GPU memory that torch's allocator holds.

        NVML knows the use of each process, but by process ids of the host, which a container does not know. There the
        result is the memory that came into use between construction and the first call; no other process may use the
        GPU in that time.
        """
        if self._calibrated is not None:
            return self._calibrated
        own = _own_bytes(self._handle)
        if own is not None and own >= held_bytes:
            return own - held_bytes
        self._calibrated = max(_used_bytes(self._handle) - self._used_by_others - held_bytes, 0)
        return self._calibrated


def first_visible_gpu() -> Any:
    """NVML's handle of the GPU that CUDA calls 0; None if there is none. It takes no CUDA context."""
    import pynvml

    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        if first.isdigit():
            return pynvml.nvmlDeviceGetHandleByIndex(int(first))
        return pynvml.nvmlDeviceGetHandleByUUID(first)
    return None


def _used_bytes(handle: Any) -> int:
    import pynvml

    if handle is not None:
        with suppress(pynvml.NVMLError):
            return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    return 0


def _own_bytes(handle: Any) -> int | None:
    import pynvml

    if handle is not None:
        with suppress(pynvml.NVMLError):
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid == os.getpid() and process.usedGpuMemory is not None:
                    return int(process.usedGpuMemory)
    return None
