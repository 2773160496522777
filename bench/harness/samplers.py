"""Samples memory of processes, and memory and use of GPUs as the driver reports them. Creates no CUDA context."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import psutil
import pynvml

from rljob_trainer.hardware import visible_handles
from rljob_trainer.telemetry.memory import first_visible_gpu


def device_used_bytes() -> int:
    """Memory in use on the first visible GPU by all processes; 0 without a GPU."""
    gpu = first_visible_gpu()
    return 0 if gpu is None else int(pynvml.nvmlDeviceGetMemoryInfo(gpu).used)


class Sampler(threading.Thread):
    """Context manager that samples in a thread of its own."""

    seconds_between_samples: float

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ended = threading.Event()

    def sample(self) -> None:
        raise NotImplementedError

    def run(self) -> None:
        while not self._ended.wait(self.seconds_between_samples):
            self.sample()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()


class DevicePeak(Sampler):
    """`peak_bytes`: the most memory of the first visible GPU that all processes use."""

    seconds_between_samples = 0.02

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0

    def sample(self) -> None:
        self.peak_bytes = max(self.peak_bytes, device_used_bytes())


class DeviceUse(Sampler):
    """Memory in use over time on the one of some GPUs that uses most, without what was in use before."""

    seconds_between_samples = 0.02

    def __init__(self, gpus: Sequence[Any]) -> None:
        super().__init__()
        self._gpus = gpus
        """Handles of NVML."""
        self._before = self._used()
        self.samples: list[tuple[float, int]] = []
        """Seconds since the epoch, and bytes."""

    def _used(self) -> list[int]:
        return [int(pynvml.nvmlDeviceGetMemoryInfo(gpu).used) for gpu in self._gpus]

    def sample(self) -> None:
        if self._gpus:
            used = zip(self._used(), self._before, strict=True)
            self.samples.append((time.time(), max(now - before for now, before in used)))

    def peak(self, spans: Sequence[tuple[float, float]]) -> int:
        """The most bytes within any of the spans; 0 without a sample in them."""
        inside = (used for when, used in self.samples if any(begun <= when <= ended for begun, ended in spans))
        return max(inside, default=0)


class MemoryWatch(Sampler):
    """`peak_bytes`: peak resident memory of processes, by name."""

    seconds_between_samples = 0.5

    def __init__(self, processes: Mapping[str, psutil.Process]) -> None:
        super().__init__()
        self._processes = processes
        self.peak_bytes: dict[str, int] = {}

    def sample(self) -> None:
        for name, process in self._processes.items():
            self.peak_bytes[name] = max(self.peak_bytes.get(name, 0), process.memory_info().rss)


class GpuUse(Sampler):
    """The share of time in which a kernel ran, on each GPU. No samples without a GPU."""

    seconds_between_samples = 0.2
    """NVML's utilization is that of the last sixth of a second to one second, depending on the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[tuple[float, tuple[int, ...]]] = []
        """Seconds since the epoch, and the utilization of each GPU in percent."""
        self._gpus: list[Any] = []
        try:
            pynvml.nvmlInit()
            self._gpus = visible_handles()
        except pynvml.NVMLError:
            pass

    def sample(self) -> None:
        if self._gpus:
            used = tuple(int(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu) for gpu in self._gpus)
            self.samples.append((time.time(), used))


def idle_of_each_gpu(samples: Iterable[tuple[float, Sequence[int]]], steps: Sequence[Mapping[str, Any]]) -> list[float]:
    """Share of the time of `steps` in which each GPU ran no kernel; empty without samples. `steps`: ledger records."""
    spans = [(step["committed_at"] - step["total_seconds"], step["committed_at"]) for step in steps]
    inside = [used for when, used in samples if any(begun <= when <= ended for begun, ended in spans)]
    return [1 - statistics.mean(of_gpu) / 100 for of_gpu in zip(*inside, strict=True)]
