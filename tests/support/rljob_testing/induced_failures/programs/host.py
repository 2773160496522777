"""Failures of host memory and of /dev/shm."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import subprocess
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from rljob_memory.diagnosis import FailureClass
from rljob_testing.induced_failures.catalogue import NotPossibleHere, induces

# The container's memory, or the process's limit, is exhausted. No GPU is involved.


GIB = 1 << 30
LIMIT_BYTES = 2 * GIB
_CGROUPS = Path("/sys/fs/cgroup")


def offload_optimizer_state() -> None:
    """Two moments of more and more parameters, in host memory."""
    state = []
    for layer in range(64):
        state.append(torch.zeros(GIB // 16))
        print(f"layer {layer}: {(layer + 1) / 4:.2f} GiB of optimizer state offloaded", flush=True)


def offload_in(cgroup: Path) -> None:
    (cgroup / "cgroup.procs").write_text(str(os.getpid()))
    offload_optimizer_state()


@induces(FailureClass.HOST_MEMORY, needs_gpu=False)
def killed_at_the_containers_limit(folder: Path) -> None:
    """The kernel kills the process; only the cgroup's counter shows it."""
    cgroup, events = _memory_cgroup()
    try:
        process = multiprocessing.get_context("fork").Process(target=offload_in, args=(cgroup,))
        process.start()
        process.join(60)
        (folder / events).write_text((cgroup / events).read_text())
        print(f"policy rank 0 (pid {process.pid}) exited: exitcode: {process.exitcode}")
    finally:
        _remove(cgroup)


@induces(FailureClass.HOST_MEMORY, needs_gpu=False)
def refused_at_the_processs_limit(folder: Path) -> None:
    """malloc fails, and torch reports it."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_BYTES, used + LIMIT_BYTES))
    offload_optimizer_state()


def _memory_cgroup() -> tuple[Path, str]:
    """A new cgroup with a memory limit, and its events file. Raises `NotPossibleHere`."""
    version_2 = (_CGROUPS / "cgroup.controllers").exists()
    parent = _CGROUPS if version_2 else _CGROUPS / "memory"
    cgroup = parent / f"induced-failure-{os.getpid()}"
    try:
        if version_2:
            (parent / "cgroup.subtree_control").write_text("+memory")
        cgroup.mkdir()
        limit = "memory.max" if version_2 else "memory.limit_in_bytes"
        (cgroup / limit).write_text(str(LIMIT_BYTES))
    except OSError as error:
        raise NotPossibleHere(f"needs to make a memory cgroup: {error}") from error
    return cgroup, "memory.events" if version_2 else "memory.oom_control"


def _remove(cgroup: Path) -> None:
    for _ in range(50):
        try:
            return cgroup.rmdir()
        except OSError:
            time.sleep(0.1)


# /dev/shm has the 64 MiB of a container's default. No GPU is involved.


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
