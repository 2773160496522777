"""How much memory a process uses, as numbers and as a log.

`PyTorch allocated` ≤ `reserved` ≤ what is gone from the device: the first two are this process's caching allocator, the
last includes contexts, NCCL and every other process. A failure is explained by all three together, never by one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rljob_trainer.errors import OutputUnavailable
from rljob_trainer.telemetry.allocator import allocator_counters
from rljob_trainer.telemetry.host_memory import host_memory
from rljob_trainer.telemetry.outside_torch import OutsideTorch

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ALWAYS_WRITTEN = frozenset({"allocated", "reserved", "device_total", "rss"})

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes; 0 where there is none, or where it was not asked for.

    `allocated`, `reserved`: of torch's caching allocator now; `peak_…`: their highest since the phase began.
    `device_free`, `device_total`: of the whole device, all processes together. `rss`, `peak_rss`: resident host memory.
    `active`: in tensors, or waiting for a kernel that still uses it. `inactive_split`: free parts of segments that also
    hold tensors, which the allocator cannot give back (0 for expandable segments, which it can unmap in part).
    `alloc_retries`: how often the allocator had to give its whole cache back to serve a request; `ooms`: how often that
    was not enough. Both count from the process's start.
    `outside_torch`: of this process on the device, beside the allocator. `asleep`: part of `reserved` that a sleeping
    engine gave back to the device behind torch's back.
    `host_used`, `host_limit`, `oom_kills`: of the container; `shm_used`, `shm_size`: of /dev/shm. See `HostMemory`.
    """

    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    device_free: int = 0
    device_total: int = 0
    rss: int = 0
    peak_rss: int = 0
    active: int = 0
    inactive_split: int = 0
    alloc_retries: int = 0
    ooms: int = 0
    outside_torch: int = 0
    asleep: int = 0
    host_used: int = 0
    host_limit: int = 0
    oom_kills: int = 0
    shm_used: int = 0
    shm_size: int = 0


@dataclass(frozen=True, slots=True)
class Where:
    """What a process is at. `micro_batch`: how many of the phase's micro-batches are done. `phases_begun`: so far."""

    step: int = 0
    phase: str | None = None
    micro_batch: int | None = None
    phases_begun: int = 0


class MemoryLog:
    """Appends one JSON line a sample to `path`: `{time, began, step, phase, micro_batch, …the sample's bytes}`.

    `time` and `began`, that of the phase, are seconds since the epoch; `began` is null between two phases, and
    `micro_batch` at the end of one. Numbers that are 0 are left out.
    Every line is written at once: a killed process leaves all that it had logged.
    """

    def __init__(self, path: Path, device: Device) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.where = Where()
        self._file = path.open("ab", buffering=0)
        self._device: Device = device
        self._outside_torch: OutsideTorch | None = None
        self._asleep = 0
        self._began: float | None = None

    def begin_phase(self, step: int, phase: str) -> None:
        """The peaks of the samples that follow are those of this phase. Begin the first before the GPU is used."""
        self.where = Where(step, phase, phases_begun=self.where.phases_begun + 1)
        if self._device == "cuda" and self._outside_torch is None:
            self._outside_torch = OutsideTorch()
        reset_peaks(self._device)
        self._began = time.time()

    def record(self, step: int, phase: str, micro_batch: int | None = None) -> MemorySample:
        """Log a sample and return it. A micro-batch's has only the numbers that cost next to nothing."""
        if micro_batch is None:
            self.where = Where(step, phases_begun=self.where.phases_begun)
            sample = self._with_own_use(sample_memory(self._device))
        else:
            self.where = Where(step, phase, micro_batch + 1, self.where.phases_begun)
            sample = quick_sample(self._device)
        line = {"time": time.time(), "began": self._began, "step": step, "phase": phase, "micro_batch": micro_batch}
        self._write(line, sample)
        if micro_batch is None:
            self._began = None
        return sample

    @contextmanager
    def behind_torch(self) -> Iterator[None]:
        """For a sleep and a waking: what the block gives back to the device, or takes, torch's counters do not tell."""
        before = _free_or_reserved(self._device)
        yield
        self._asleep = max(self._asleep + _free_or_reserved(self._device) - before, 0)

    def _with_own_use(self, sample: MemorySample) -> MemorySample:
        asleep = min(self._asleep, sample.reserved)
        outside = self._outside_torch.measure(sample.reserved - asleep) if self._outside_torch else 0
        return replace(sample, asleep=asleep, outside_torch=outside)

    def _write(self, line: dict[str, Any], sample: MemorySample) -> None:
        line |= {name: value for name, value in asdict(sample).items() if value or name in _ALWAYS_WRITTEN}
        try:
            self._file.write(json.dumps(line).encode() + b"\n")
        except OSError as error:
            raise OutputUnavailable(
                f"cannot write the memory log {self._file.name}: {error}; make room there and run again"
            ) from error


def sample_memory(device: Device) -> MemorySample:
    """This process's memory now, and its container's. Imports torch only for `cuda`."""
    sample = quick_sample(device)
    host = host_memory()
    return replace(
        sample,
        peak_rss=max(sample.rss, _peak_rss_bytes()),
        host_used=host.used,
        host_limit=host.limit,
        oom_kills=host.oom_kills,
        shm_used=host.shm_used,
        shm_size=host.shm_size,
    )


def quick_sample(device: Device) -> MemorySample:
    """The numbers that one call each tells: of the allocator, the device, and the process's resident memory."""
    rss = _rss_bytes()
    if device == "cpu":
        return MemorySample(rss=rss)
    import torch

    counters = allocator_counters()
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_initialized() else (0, 0)
    return MemorySample(**asdict(counters), device_free=free, device_total=total, rss=rss)


def reset_peaks(device: Device) -> None:
    """Start the peaks anew from what is in use now."""
    with suppress(OSError):  # Without /proc, or where it is read-only, the peak is that of the process's life.
        Path("/proc/self/clear_refs").write_text("5")
    if device == "cuda":
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()


def _free_or_reserved(device: Device) -> int:
    """What torch's allocator gives back goes from the one to the other; only what goes past it changes the sum."""
    sample = quick_sample(device)
    return sample.device_free + sample.reserved


def _rss_bytes() -> int:
    with suppress(OSError, ValueError), open("/proc/self/statm", encoding="ascii") as pages:
        return int(pages.read().split()[1]) * _PAGE_BYTES
    return 0


def _peak_rss_bytes() -> int:
    with suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
