"""Memory in use on the first visible GPU by all processes, as the driver reports it. Creates no CUDA context."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
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
        self.samples: list[tuple[float, int]] = []
        """Seconds since the epoch, and the memory in use at that time."""
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(SAMPLE_EVERY_SECONDS):
            self.samples.append((time.time(), device_used_bytes()))

    @property
    def peak_bytes(self) -> int:
        return max((used_bytes for _, used_bytes in self.samples), default=0)

    def peak_within(self, spans: Iterable[tuple[float, float]]) -> int:
        """Largest use in any of `spans`, from and to seconds since the epoch; 0 if no sample is in one."""
        spans = list(spans)
        inside = (used for when, used in self.samples if any(begun <= when <= ended for begun, ended in spans))
        return max(inside, default=0)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self.join()
