"""Injected faults, inside the process that fails: real exhaustion on a GPU, torch's error message on the CPU."""

from __future__ import annotations

import errno
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import psutil

from rljob_api.fault_injection import Fault, FaultPhase
from rljob_api.plan_change import Role
from rljob_client.errors import BadInput
from rljob_trainer.telemetry.host_memory import host_memory

INJECTED = "(injected by spec.faultInjection)"

LEAKED_BYTES = 200 << 20
_SHARED_MEMORY = Path("/dev/shm")
_PIECE_BYTES = 64 << 20
_FRAGMENT_BYTES = 9 << 20
"""Two fit into a segment of 20 MiB. If every second one is freed, no segment is free, so none can be released."""

_METHODS: dict[Role, dict[FaultPhase, str]] = {
    "policy": {
        "load": "load",
        "update": "update",
        "optimizer": "update",
        "sync": "sync",
        "checkpoint": "start_checkpoint",
    },
    "rollout": {"load": "start", "rollout": "generate_for_step", "sync": "start_weight_update"},
}

_CPU_NUMBERS = {
    # requested, free, allocated, reserved but unallocated: GiB on a GPU with 80
    "Fragmentation": (2.40, 1.10, 58.20, 16.10),
    "AllocatorCache": (4.00, 0.30, 52.00, 22.00),
    "ActivationSpike": (24.00, 9.50, 61.00, 0.40),
    "KVCacheOversized": (1.00, 0.95, 74.00, 0.30),
    "WeightSyncSpike": (1.20, 0.50, 76.00, 0.40),
    "OptimizerState": (5.60, 1.90, 74.00, 0.30),
}
_CARD_GIB = 80.0


def target_role(fault: Fault) -> Role:
    """The role whose process is to fail."""
    in_engine = fault.phase == "rollout" or (
        fault.fault_class == "KVCacheOversized" and fault.phase in ("load", "sync")
    )
    return "rollout" if in_engine else "policy"


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A fault, in the form that its process receives."""

    fault: Fault

    method: str
    """The process fails in the next call of this method."""

    device: Literal["cpu", "cuda"]

    @classmethod
    def of(cls, fault: Fault, device: Literal["cpu", "cuda"]) -> InjectedFault:
        return cls(fault, _METHODS[target_role(fault)][fault.phase], device)

    def fail_in(self, role: Any) -> None:
        """Fail now, or, for a fault in an update, once `role` reaches the given point of it. A leak fails nothing."""
        if self.fault.fault_class == "Leak":
            return _leak(self.device)
        match self.fault.phase:
            case "update":
                role.after_micro_batch(self._fail)
            case "optimizer":
                role.after_optimizer_step(self._fail)
            case phase:
                role.begin_phase(phase)
                role.fail(self._fail)

    def _fail(self) -> NoReturn:
        match self.fault.fault_class:
            case "WorkerLost":
                os.kill(os.getpid(), signal.SIGKILL)
            case "Hang":
                _hang()
            case "HostMemory":
                _exhaust_host_memory()
            case "SharedMemory":
                _exhaust_shared_memory()
            case _ if self.device == "cuda":
                _exhaust_gpu_memory(fragmented=self.fault.fault_class == "Fragmentation")
        import torch

        raise torch.OutOfMemoryError(_message(self.fault))


_leaked: list[Any] = []


def _leak(device: Literal["cpu", "cuda"]) -> None:
    """Keep memory until this process ends: in tensors of the GPU, or else of the host."""
    import torch

    _leaked.append(torch.ones(LEAKED_BYTES, dtype=torch.uint8, device=device))


def _hang() -> NoReturn:
    while True:
        time.sleep(3600)


def _exhaust_gpu_memory(*, fragmented: bool) -> NoReturn:
    """Allocate GPU memory until torch runs out of it.

    `fragmented`: then free every second piece, and request a block that would fit into the free memory.
    """
    import torch

    held: list[torch.Tensor] = []
    piece_bytes = _FRAGMENT_BYTES if fragmented else _PIECE_BYTES
    try:
        while True:
            held.append(torch.empty(piece_bytes, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError as error:
        if not fragmented:
            raise torch.OutOfMemoryError(
                f"{error} {INJECTED}: the fault held {len(held) * piece_bytes} bytes"
            ) from None
    del held[::2]
    held.append(torch.empty(len(held) * piece_bytes, dtype=torch.uint8, device="cuda"))
    raise AssertionError("expected torch to run out of memory")


def _exhaust_host_memory() -> NoReturn:
    """Allocate and touch memory until the kernel kills this process. Raises `BadInput` without a cgroup limit."""
    limit_bytes, machine_bytes = host_memory().host_limit_bytes, psutil.virtual_memory().total
    if limit_bytes >= machine_bytes:
        raise BadInput(
            "expected a container with a memory limit for a fault of class HostMemory, found none: the kernel might "
            "kill another program of this machine; set a limit, or choose another class"
        )
    held = []
    while True:
        held.append(b"\1" * _PIECE_BYTES)


def _exhaust_shared_memory() -> NoReturn:
    """Fill /dev/shm until it is full, then free it."""
    path = _SHARED_MEMORY / f"rljob-fault-{os.getpid()}"
    try:
        with path.open("wb", buffering=0) as file:
            while True:
                file.write(b"\1" * _PIECE_BYTES)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} {INJECTED}", str(path)) from None
    finally:
        path.unlink(missing_ok=True)


def _message(fault: Fault) -> str:
    requested, free, allocated, unallocated = _CPU_NUMBERS[fault.fault_class]
    return (
        f"CUDA out of memory. Tried to allocate {requested:.2f} GiB. GPU {fault.rank} has a total capacity of "
        f"{_CARD_GIB:.2f} GiB of which {free:.2f} GiB is free. Including non-PyTorch memory, this process has "
        f"{_CARD_GIB - free:.2f} GiB memory in use. Of the allocated memory {allocated:.2f} GiB is allocated by "
        f"PyTorch, and {unallocated:.2f} GiB is reserved by PyTorch but unallocated. {INJECTED}"
    )
