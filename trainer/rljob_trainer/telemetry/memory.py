"""Measures the memory of a process and logs it.

torch's `allocated` ≤ torch's `reserved` ≤ device memory in use: the first two are this process's caching allocator, the
last includes CUDA contexts, NCCL and every other process. A failure is explained by all three together, never by one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rljob_client.errors import BadInput, OutputUnavailable
from rljob_client.run_directory.memory_logs import old_log
from rljob_memory.sample import MemorySample
from rljob_trainer.hardware import visible_handles
from rljob_trainer.telemetry.host_memory import host_memory

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Progress:
    """The point that a process has reached."""

    step: int = 0

    phase: str | None = None
    """None between two phases."""

    micro_batches_done: int | None = None
    """Micro-batches of the phase that are done. None before the first one."""

    phases_begun: int = 0
    """Phases that the process has begun so far. Tells a retry of a phase from its first try."""


_LARGEST_LOG_BYTES = 32 << 20
"""About 100,000 samples: 2,500 steps of 40 micro-batches."""


class MemoryLog:
    """Appends samples to a file, one JSON line each.

    Every line is written at once: a killed process leaves all samples that it took. A full file becomes
    `<name>.jsonl.old`, and replaces the older one.
    """

    def __init__(self, path: Path, device: Device, largest_bytes: int = _LARGEST_LOG_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.progress = Progress()
        self._path = path
        self._largest_bytes = largest_bytes
        self._file = path.open("ab", buffering=0)
        self._device: Device = device
        self._outside_torch: OutsideTorch | None = None
        self._asleep_bytes = 0
        self._began: float | None = None

    def begin_phase(self, step: int, phase: str) -> None:
        """Start a phase: the peaks of later samples are its own. Begin the first one before the GPU is used."""
        self.progress = Progress(step, phase, phases_begun=self.progress.phases_begun + 1)
        if self._device == "cuda" and self._outside_torch is None:
            self._outside_torch = OutsideTorch()
        reset_peaks(self._device)
        self._began = time.time()

    def record(self, step: int, phase: str, micro_batch: int | None = None) -> MemorySample:
        """Log a sample and return it. After a micro-batch it has only the numbers that cost next to nothing."""
        if micro_batch is None:
            self.progress = Progress(step, phases_begun=self.progress.phases_begun)
            sample = self._with_own_use(sample_memory(self._device))
        else:
            self.progress = Progress(step, phase, micro_batch + 1, self.progress.phases_begun)
            sample = quick_sample(self._device)
        sample = replace(sample, time=time.time(), began=self._began, step=step, phase=phase, micro_batch=micro_batch)
        self._write(sample)
        if micro_batch is None:
            self._began = None
        return sample

    @contextmanager
    def behind_torch(self) -> Iterator[None]:
        """Measure a sleep or a wake-up: torch's counters do not show what the block gives to the device or takes."""
        before = _free_or_reserved_bytes(self._device)
        yield
        self._asleep_bytes = max(self._asleep_bytes + _free_or_reserved_bytes(self._device) - before, 0)

    def _with_own_use(self, sample: MemorySample) -> MemorySample:
        sample = replace(sample, asleep_bytes=min(self._asleep_bytes, sample.reserved_bytes))
        outside = self._outside_torch.measure(sample.held_bytes) if self._outside_torch else 0
        return replace(sample, outside_torch_bytes=outside)

    def _write(self, sample: MemorySample) -> None:
        try:
            if self._file.tell() >= self._largest_bytes:
                self._file.close()
                self._path.replace(old_log(self._path))
                self._file = self._path.open("ab", buffering=0)
            self._file.write(json.dumps(sample.as_line()).encode() + b"\n")
        except OSError as error:
            raise OutputUnavailable(
                f"cannot write the memory log {self._file.name}: {error}; make room there and run again"
            ) from error


def sample_memory(device: Device) -> MemorySample:
    """Memory of this process and of its container, now. Imports torch only for `cuda`."""
    sample, host = quick_sample(device), host_memory()
    return replace(
        sample,
        peak_rss_bytes=max(sample.rss_bytes, _peak_rss_bytes()),
        host_used_bytes=host.host_used_bytes,
        host_limit_bytes=host.host_limit_bytes,
        oom_kills=host.oom_kills,
        shared_memory_used_bytes=host.shared_memory_used_bytes,
        shared_memory_bytes=host.shared_memory_bytes,
    )


def quick_sample(device: Device) -> MemorySample:
    """The numbers that take one call each: of the allocator, the device, and the process's resident memory."""
    resident = _resident_memory()
    if device == "cpu":
        return resident
    import torch

    free, total = torch.cuda.mem_get_info() if torch.cuda.is_initialized() else (0, 0)
    return replace(
        allocator_sample(),
        device_free_bytes=free,
        device_total_bytes=total,
        rss_bytes=resident.rss_bytes,
        anonymous_bytes=resident.anonymous_bytes,
    )


def reset_peaks(device: Device) -> None:
    """Let the peaks start again at what is in use now."""
    with suppress(OSError):  # Without /proc, or if it is read-only, the peak is that of the process's life.
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    if device == "cuda":
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()


def _free_or_reserved_bytes(device: Device) -> int:
    """Sum of free and reserved memory. The allocator only moves memory between the two; sleeping changes the sum."""
    sample = quick_sample(device)
    return sample.device_free_bytes + sample.reserved_bytes


def _resident_memory() -> MemorySample:
    with suppress(OSError, ValueError), open("/proc/self/statm", encoding="ascii") as pages:
        _, resident, shared, *_ = map(int, pages.read().split())
        return MemorySample(rss_bytes=resident * _PAGE_BYTES, anonymous_bytes=(resident - shared) * _PAGE_BYTES)
    return MemorySample()


def _peak_rss_bytes() -> int:
    with suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def allocator_sample() -> MemorySample:
    """Memory of the current device in torch's allocator; zeros before its first use.

    All counters from one call: `torch.cuda.memory_allocated()` and similar functions each repeat it and flatten its 100
    numbers.

    Takes the allocator's lock, and waits for no kernel.
    """
    import torch

    if not torch.cuda.is_initialized():
        return MemorySample()
    return sample_of_stats(torch._C._cuda_memoryStats(torch.cuda.current_device()))


def sample_of_stats(stats: Mapping[str, Any]) -> MemorySample:
    """`stats`: as `torch.cuda.memory_stats_as_nested_dict` gives them. A counter that a version of torch lacks is 0."""

    def of_all_pools(name: str, when: str) -> int:
        return int(stats.get(name, {}).get("all", {}).get(when, 0))

    return MemorySample(
        allocated_bytes=of_all_pools("allocated_bytes", "current"),
        reserved_bytes=of_all_pools("reserved_bytes", "current"),
        peak_allocated_bytes=of_all_pools("allocated_bytes", "peak"),
        peak_reserved_bytes=of_all_pools("reserved_bytes", "peak"),
        active_bytes=of_all_pools("active_bytes", "current"),
        inactive_split_bytes=of_all_pools("inactive_split_bytes", "current"),
        alloc_retries=int(stats.get("num_alloc_retries", 0)),
        ooms=int(stats.get("num_ooms", 0)),
    )


class OutsideTorch:
    """GPU memory of this process outside torch's allocator: the CUDA context, NCCL, cuBLAS, loaded kernels.

    Create it before this process touches its GPU: memory in use by then counts as that of other processes.
    """

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

    with suppress(pynvml.NVMLError, BadInput):
        pynvml.nvmlInit()
        return next(iter(visible_handles()), None)
    return None


def _used_bytes(handle: Any) -> int:
    import pynvml

    if handle is not None:
        with suppress(pynvml.NVMLError):
            return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    return 0


def _own_bytes(handle: Any) -> int | None:
    return next((used for pid, used in _processes(handle) if pid == os.getpid()), None)


def gpu_processes() -> tuple[int | None, list[tuple[int, int]]]:
    """GPU memory of this process, and process id and memory of every other one on its GPU, in bytes, by NVML.

    None and an empty list inside a container: there the ids are the host's, and the own one is unknown.
    """
    found = dict(_processes(first_visible_gpu()))
    own = found.pop(os.getpid(), None)
    return own, [] if own is None else list(found.items())


def _processes(handle: Any) -> list[tuple[int, int]]:
    import pynvml

    if handle is not None:
        with suppress(pynvml.NVMLError):
            running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            return [(each.pid, int(each.usedGpuMemory)) for each in running if each.usedGpuMemory is not None]
    return []
