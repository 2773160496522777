"""How much memory a process uses, as numbers and as a log.

`PyTorch allocated` ≤ `reserved` ≤ what is gone from the device: the first two are this process's caching allocator, the
last includes contexts, NCCL and every other process. A failure is explained by all three together, never by one.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from rljob_trainer.errors import OutputUnavailable


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes; all of the device are 0 where the process uses none.

    `allocated`, `reserved`: of torch's caching allocator now; `peak_…`: their highest since the last `reset_peaks`.
    `device_free`, `device_total`: of the whole device, all processes together. `rss`, `peak_rss`: resident host memory.
    """

    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    device_free: int = 0
    device_total: int = 0
    rss: int = 0
    peak_rss: int = 0


def sample_memory(device: Literal["cpu", "cuda"]) -> MemorySample:
    """This process's memory now. Imports torch only for `cuda`."""
    rss = psutil.Process().memory_info().rss
    host = {"rss": rss, "peak_rss": max(rss, _peak_rss_bytes())}
    if device == "cpu":
        return MemorySample(**host)
    import torch

    free, total = torch.cuda.mem_get_info()
    return MemorySample(
        allocated=torch.cuda.memory_allocated(),
        reserved=torch.cuda.memory_reserved(),
        peak_allocated=torch.cuda.max_memory_allocated(),
        peak_reserved=torch.cuda.max_memory_reserved(),
        device_free=free,
        device_total=total,
        **host,
    )


def reset_peaks(device: Literal["cpu", "cuda"]) -> None:
    """Start the peaks anew from what is in use now."""
    with suppress(OSError):  # Without /proc, or where it is read-only, the peak is that of the process's life.
        Path("/proc/self/clear_refs").write_text("5")
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()


class MemoryLog:
    """Appends one JSON line a sample to `path`: `{time, step, phase, micro_batch, …the sample's bytes}`.

    `time` is seconds since the epoch; `micro_batch` is null for the end of a phase.
    """

    def __init__(self, path: Path, device: Literal["cpu", "cuda"]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._device: Literal["cpu", "cuda"] = device

    def begin_phase(self) -> None:
        """The peaks of the samples that follow are those of this phase."""
        reset_peaks(self._device)

    def record(self, step: int, phase: str, micro_batch: int | None = None) -> MemorySample:
        """Log a sample and return it."""
        sample = sample_memory(self._device)
        line = {"time": time.time(), "step": step, "phase": phase, "micro_batch": micro_batch, **asdict(sample)}
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise OutputUnavailable(
                f"cannot write the memory log {self._file.name}: {error}; make room there and run again"
            ) from error
        return sample


def _peak_rss_bytes() -> int:
    with suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
