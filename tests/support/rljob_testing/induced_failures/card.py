"""Shares one GPU between programs: each waits for its turn, and for an empty GPU."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path

import pynvml
import torch

from rljob_testing.induced_failures.catalogue import NotPossibleHere
from rljob_trainer.telemetry.memory import first_visible_gpu

GIB = 1 << 30
LOCK_VARIABLE = "INDUCED_FAILURES_LOCK"
SECONDS_VARIABLE = "INDUCED_FAILURES_SECONDS"
_EMPTY_SHARE = 0.975
_SECONDS_UNTIL_EMPTY = 30


@dataclass(frozen=True, slots=True)
class Card:
    """The first GPU that this process may use."""

    total_bytes: int
    free_bytes: int
    """Memory that this process can allocate, without its own CUDA context."""

    @property
    def free_gib(self) -> float:
        return self.free_bytes / GIB


def has_gpu() -> bool:
    """Asks NVML rather than CUDA, so the process can still be forked."""
    return torch.cuda.device_count() > 0


def take_turn() -> None:
    """Wait until no other program uses the GPU. The turn ends with the process, or when its time is over.

    Creates no CUDA context. Programs load their libraries before their turn, several at once, as this takes most of
    their time. Raises `NotPossibleHere` without a GPU.
    """
    if not has_gpu():
        raise NotPossibleHere("needs an NVIDIA GPU")
    if lock := os.environ.get(LOCK_VARIABLE):
        fcntl.flock(os.open(lock, os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)
    faulthandler.dump_traceback_later(float(os.environ.get(SECONDS_VARIABLE, "60")), exit=True)


def take_card() -> Card:
    """Wait for the turn and for the release of the last program's memory, and create this process's CUDA context.

    Raises `NotPossibleHere` without a GPU, or if other processes hold much of it.
    """
    take_turn()
    deadline = time.monotonic() + _SECONDS_UNTIL_EMPTY
    while (used := _used_share()) > 1 - _EMPTY_SHARE:
        if time.monotonic() > deadline:
            raise NotPossibleHere(f"needs an empty GPU; {used:.0%} of it are in use")
        time.sleep(0.05)
    free, total = torch.cuda.mem_get_info(0)
    return Card(total, free)


def _used_share() -> float:
    """Share of the GPU's memory in use, by NVML: on a full GPU, CUDA cannot be initialized."""
    memory = pynvml.nvmlDeviceGetMemoryInfo(first_visible_gpu())
    return float(memory.used / memory.total)


def gib(size: float) -> torch.Tensor:
    """A tensor of `size` GiB on the GPU, uninitialized."""
    return torch.empty(int(size * GIB), dtype=torch.uint8, device="cuda")


def floats(size_bytes: float) -> torch.Tensor:
    """A tensor of float32 zeros of `size_bytes` on the GPU."""
    return torch.zeros(int(size_bytes) // 4, device="cuda")


def memory_log_of(folder: Path) -> Path:
    """Path of the memory log of the first policy rank."""
    return folder / "memory" / "policy-0.jsonl"
