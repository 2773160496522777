"""What this machine has: GPUs and memory, read without creating a CUDA context."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import psutil

from rljob_trainer.errors import BadInput

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Machine:
    """`gpu_memory_bytes[i]`: total of GPU i. `host_memory_bytes`: what this process may use, cgroup limit included."""

    gpu_memory_bytes: tuple[int, ...]
    host_memory_bytes: int
    cores: int

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
        cores=len(os.sched_getaffinity(0)),
    )


def torch_version() -> str:
    """The installed torch's version, without importing it."""
    return version("torch")


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
