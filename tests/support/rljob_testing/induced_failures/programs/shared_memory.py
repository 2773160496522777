"""/dev/shm has the 64 MiB of a container's default. No GPU is involved."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from rljob_memory.diagnosis import FailureClass
from rljob_testing.induced_failures.catalogue import NotPossibleHere, induces

_CLONE_NEWNS = 0x00020000


class LongTexts(Dataset[torch.Tensor]):
    """Items of 8 MiB."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1 << 20,), index)


def use_small_shared_memory() -> None:
    """Give this process and its children a /dev/shm of 64 MiB. Raises `NotPossibleHere`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        raise NotPossibleHere(f"needs to mount a small /dev/shm: unshare: {os.strerror(ctypes.get_errno())}")
    for command in (
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise NotPossibleHere(f"needs to mount a small /dev/shm: {done.stderr.strip()}")


@induces(FailureClass.SHARED_MEMORY, needs_gpu=False)
def batches_of_data_workers(folder: Path) -> None:
    """Data workers pass their batches through /dev/shm."""
    use_small_shared_memory()
    for batch in DataLoader(LongTexts(), batch_size=16, num_workers=2):
        print(batch.shape)


@induces(FailureClass.SHARED_MEMORY, needs_gpu=False)
def tensors_shared_between_processes(folder: Path) -> None:
    """Rollouts in /dev/shm for another process."""
    use_small_shared_memory()
    torch.multiprocessing.set_sharing_strategy("file_system")
    rollouts = [torch.zeros(1 << 22).share_memory_() for _ in range(16)]
    print(len(rollouts))
