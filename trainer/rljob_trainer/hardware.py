"""GPUs, memory and cores of this machine, read without creating a CUDA context."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import psutil

from rljob_trainer.errors import BadInput

Device = Literal["cpu", "cuda"]

Bundle = Mapping[str, float]
"""Ray resources of one policy rank and its engine together."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources of one machine, or of several machines together."""

    gpu_memory_bytes: tuple[int, ...]
    """Total memory of each GPU."""

    host_memory_bytes: int
    """Memory that this process may use: the limit of its cgroup is respected."""

    cores: int
    """CPU cores that this process may use: affinity and the limit of its cgroup are respected."""

    def choose_device(self, wanted: Literal["auto", "cpu", "cuda"]) -> Device:
        if wanted == "cuda" and not self.gpu_memory_bytes:
            raise BadInput(
                "expected an NVIDIA GPU (--device cuda), found none; use --device cpu, or check `nvidia-smi`"
            )
        return "cuda" if wanted != "cpu" and self.gpu_memory_bytes else "cpu"


def this_machine() -> Machine:
    return Machine(
        gpu_memory_bytes=_gpu_memory_bytes(),
        host_memory_bytes=min(psutil.virtual_memory().total, _cgroup_limit_bytes()),
        cores=min(len(os.sched_getaffinity(0)), _cgroup_cores()),
    )


def torch_version() -> str:
    """The installed torch's version, without importing it."""
    return version("torch")


def torch_may_compile() -> bool:
    """True unless the environment of this process disables torch.compile."""
    return os.environ.get("TORCH_COMPILE_DISABLE") != "1"


def _gpu_memory_bytes() -> tuple[int, ...]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        indices = range(pynvml.nvmlDeviceGetCount()) if visible is None else _listed(visible)
        return tuple(
            int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index)).total) for index in indices
        )
    finally:
        pynvml.nvmlShutdown()


def _listed(visible: str) -> list[int]:
    return [int(part) for part in visible.split(",") if part.strip().isdigit()]


def _cgroup_limit_bytes() -> int:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            return int(Path(path).read_text())
    return 1 << 62


def _cgroup_cores() -> int:
    """The CPU limit, rounded up: more threads would only compete for CPU time."""
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.ceil(int(quota) / int(period))
    with suppress(OSError, ValueError):
        quota_us = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text())
        period_us = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text())
        if quota_us > 0:
            return math.ceil(quota_us / period_us)
    return 1 << 16
