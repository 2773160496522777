"""Use of every visible GPU over time, as the driver reports it. Creates no CUDA context."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import pynvml

from rljob_trainer.hardware import visible_handles

SAMPLE_EVERY_SECONDS = 0.2
"""NVML's utilization is that of the last sixth of a second to one second, depending on the GPU."""


class GpuUse(threading.Thread):
    """Context manager that samples the share of time in which a kernel ran, on each GPU. No samples without a GPU."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, tuple[int, ...]]] = []
        """Seconds since the epoch, and the utilization of each GPU in percent."""
        self._ended = threading.Event()

    def run(self) -> None:
        gpus = _gpus()
        while gpus and not self._ended.wait(SAMPLE_EVERY_SECONDS):
            used = tuple(int(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu) for gpu in gpus)
            self.samples.append((time.time(), used))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self.join()


def idle_of_each_gpu(samples: Iterable[tuple[float, Sequence[int]]], steps: Sequence[Mapping[str, Any]]) -> list[float]:
    """Share of the time of `steps` in which each GPU ran no kernel; empty without samples. `steps`: ledger records."""
    spans = [(step["committed_at"] - step["total_seconds"], step["committed_at"]) for step in steps]
    inside = [used for when, used in samples if any(begun <= when <= ended for begun, ended in spans)]
    return [1 - statistics.mean(of_gpu) / 100 for of_gpu in zip(*inside, strict=True)]


def _gpus() -> list[Any]:
    try:
        pynvml.nvmlInit()
        return visible_handles()
    except pynvml.NVMLError:
        return []
