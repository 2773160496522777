"""GPUs, memory and cores of this machine, read without creating a CUDA context."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import psutil

from rljob_client.errors import BadInput

Device = Literal["cpu", "cuda"]

_NO_GPU = {"", "-1", "none", "void", "nodevfiles"}
"""Entries of CUDA_VISIBLE_DEVICES that hide GPUs on purpose, in lower case."""

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

    gpu_capability: tuple[int, int] | None = None
    """Lowest CUDA compute capability of the GPUs; None without GPUs, or if it is not known."""

    gpu_name: str = ""
    """Product name of the first GPU; empty without GPUs, or if it is not known."""

    def choose_device(self, wanted: Literal["auto", "cpu", "cuda"]) -> Device:
        """The device to train on. Raises `BadInput` for `cuda` without a GPU."""
        if wanted == "cuda" and not self.gpu_memory_bytes:
            raise BadInput(
                "expected an NVIDIA GPU (--device cuda), found none; use --device cpu, or check `nvidia-smi`"
            )
        return "cuda" if wanted != "cpu" and self.gpu_memory_bytes else "cpu"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or a MIG device."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    """CUDA compute capability."""


def this_machine(*, gpus: bool = True) -> Machine:
    """The resources of this machine. `gpus`: look for GPUs.

    Raises `BadInput` if CUDA_VISIBLE_DEVICES names GPUs that do not exist.
    """
    found = visible_gpus() if gpus else []
    return Machine(
        gpu_memory_bytes=tuple(gpu.memory_bytes for gpu in found),
        host_memory_bytes=min(psutil.virtual_memory().total, _cgroup_limit_bytes()),
        cores=visible_cores(),
        gpu_capability=min((gpu.capability for gpu in found), default=None),
        gpu_name=found[0].name if found else "",
    )


def visible_cores() -> int:
    """CPU cores that this process may use: affinity and the limit of its cgroup are respected."""
    return min(len(os.sched_getaffinity(0)), _cgroup_cores())


def torch_version() -> str:
    """The installed torch's version, without importing it."""
    return version("torch")


def torch_may_compile() -> bool:
    """True unless the environment of this process disables torch.compile."""
    return os.environ.get("TORCH_COMPILE_DISABLE") != "1"


def visible_gpus() -> list[Gpu]:
    """The GPUs that processes of this environment see. Raises `BadInput` as `this_machine`."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [
            Gpu(
                name=_text(pynvml.nvmlDeviceGetName(gpu)),
                memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(gpu).total),
                capability=pynvml.nvmlDeviceGetCudaComputeCapability(gpu),
            )
            for gpu in visible_handles()
        ]
    finally:
        pynvml.nvmlShutdown()


def visible_handles() -> list[Any]:
    """NVML's handles of these GPUs, while NVML is initialized. Raises `BadInput` as `this_machine`."""
    import pynvml

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return present if visible is None else [_handle(name, present) for name in _names(visible)]


def gpus_beginning_with(own: str) -> str:
    """A value of CUDA_VISIBLE_DEVICES: `own`, which is an entry of the present value, and then the others.

    Without a present value, the entries are the indices of all GPUs.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = list(map(str, range(len(visible_gpus())))) if visible is None else _names(visible)
    return ",".join([own, *(name for name in names if name != own)])


def _names(visible: str) -> list[str]:
    """The entries of CUDA_VISIBLE_DEVICES, up to one that hides the rest."""
    names = (part.strip() for part in visible.split(","))
    return list(takewhile(lambda name: name.lower() not in _NO_GPU, names))


def _handle(name: str, present: Sequence[Any]) -> Any:
    """The GPU of an entry: an index, the UUID of a GPU or the start of one, or the UUID of a MIG device.

    Raises `BadInput` if there is none: CUDA would hide it and all later ones, without a message.
    """
    import pynvml

    if name.isdigit() and int(name) < len(present):
        return present[int(name)]
    if name.startswith("GPU-"):
        matching = [handle for handle in present if _uuid(handle).startswith(name)]
        if len(matching) == 1:
            return matching[0]
    if name.startswith("MIG-"):
        with suppress(pynvml.NVMLError):
            return pynvml.nvmlDeviceGetHandleByUUID(name)
    raise BadInput(
        f"CUDA_VISIBLE_DEVICES: expected indices below {len(present)}, or UUIDs of GPUs or MIG devices, "
        f"found {name!r}; `nvidia-smi -L` lists them. Correct it, or use --device cpu"
    )


def _uuid(handle: Any) -> str:
    import pynvml

    return _text(pynvml.nvmlDeviceGetUUID(handle))


def _text(value: bytes | str) -> str:
    """Old versions of NVML's bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _cgroup_limit_bytes() -> int:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            return int(Path(path).read_text(encoding="utf-8"))
    return 1 << 62


def _cgroup_cores() -> int:
    """The CPU limit, rounded up: more threads would only compete for CPU time."""
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        return math.ceil(int(quota) / int(period))
    with suppress(OSError, ValueError):
        quota_us = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text(encoding="utf-8"))
        period_us = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text(encoding="utf-8"))
        if quota_us > 0:
            return math.ceil(quota_us / period_us)
    return 1 << 16
