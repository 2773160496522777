"""Memory in use on the first visible GPU by all processes, as the driver reports it. Creates no CUDA context."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

import pynvml

from rljob_trainer.telemetry.outside_torch import first_visible_gpu

SAMPLE_EVERY_SECONDS = 0.02


def device_used_bytes() -> int:
    """Memory in use on the first visible GPU by all processes; 0 without a GPU."""
    gpu = first_visible_gpu()
    return 0 if gpu is None else int(pynvml.nvmlDeviceGetMemoryInfo(gpu).used)


def device_processes() -> int:
    """Number of processes with a CUDA context on the first visible GPU that the driver shows to this process."""
    gpu = first_visible_gpu()
    return 0 if gpu is None else len(pynvml.nvmlDeviceGetComputeRunningProcesses(gpu))


class DevicePeak(threading.Thread):
    """Context manager that samples the first visible GPU every 20 ms. `peak_bytes`: the most that all processes use."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(SAMPLE_EVERY_SECONDS):
            self.peak_bytes = max(self.peak_bytes, device_used_bytes())

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self.join()
