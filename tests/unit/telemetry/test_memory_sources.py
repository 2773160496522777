"""Memory of the container, from the files of cgroups, and GPU memory of the process outside torch, from NVML."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_testing.patience import PATIENCE_SECONDS, Deadline
from rljob_trainer.telemetry import host_memory as module
from rljob_trainer.telemetry.host_memory import host_memory
from rljob_trainer.telemetry.memory import OutsideTorch

MIB = 1 << 20
GIB = 1 << 30
STAT = "anon 3000000\nfile 900000\ninactive_file 1048576\nactive_file 7\n"
EVENTS = "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n"


def group(folder: str, used: int, limit: str | int) -> dict[str, str]:
    files = {"memory.current": f"{used}\n", "memory.max": f"{limit}\n", "memory.stat": STAT}
    return {f"{folder}{name}": text for name, text in files.items()}


VERSION_1 = {  # The container sees its own cgroup as the root.
    "memory/memory.usage_in_bytes": f"{GIB}",
    "memory/memory.limit_in_bytes": f"{2 * GIB}",
    "memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {MIB}\n",
    "memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
}


@pytest.mark.parametrize(
    ("paths", "files", "expected"),
    [
        (
            {"": "/pod/a"},
            group("pod/a/", 3 * GIB, 4 * GIB) | {"pod/a/memory.events": EVENTS},
            (3 * GIB - MIB - 7, 4 * GIB, 2),
        ),
        ({"": "/pod/a"}, group("pod/a/", GIB, "max") | {"pod/memory.max": f"{2 * GIB}"}, (GIB - MIB - 7, 2 * GIB, 0)),
        ({"": "/", "memory": "/docker/abc"}, VERSION_1, (GIB - MIB, 2 * GIB, 1)),
        ({"": "/"}, group("", GIB, "max"), (5 * GIB, 64 * GIB, 0)),
        ({"": "/"}, group("", GIB, 9223372036854771712), (5 * GIB, 64 * GIB, 0)),
        ({}, {}, (5 * GIB, 64 * GIB, 0)),
    ],
    ids=["version 2", "limit of a parent", "version 1", "no limit", "a limit above the machine's", "no cgroup"],
)
def test_use_without_cache_limit_and_kills_are_those_of_the_cgroup(
    paths: dict[str, str], files: dict[str, str], expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`paths`: of the process, by controller. Without a limit, the numbers are those of the machine."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(module, "_SYS", tmp_path)
    monkeypatch.setattr(module, "_cgroup_paths", lambda: paths)
    monkeypatch.setattr(module, "_machine", lambda: (5 * GIB, 64 * GIB))
    module._own_cgroup.cache_clear()
    memory = host_memory()
    module._own_cgroup.cache_clear()
    assert (memory.host_used_bytes, memory.host_limit_bytes, memory.oom_kills) == expected


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs a /dev/shm")
def test_files_in_shared_memory_of_this_machine_are_counted() -> None:
    memory = host_memory()
    assert 0 < memory.host_used_bytes < memory.host_limit_bytes
    # All processes of the machine share it: others, such as a Ray that ends, may free memory between two samples.
    deadline = Deadline(PATIENCE_SECONDS)
    while _growth_with_a_file(32 * MIB) < 31 * MIB:
        assert not deadline.passed


def _growth_with_a_file(size_bytes: int) -> int:
    """Growth of the shared memory in use, in bytes, with a file of `size_bytes`."""
    before = host_memory()
    path = Path(f"/dev/shm/rljob-test-{os.getpid()}")
    with path.open("wb+") as file:
        path.unlink()
        file.truncate(size_bytes)
        with mmap.mmap(file.fileno(), size_bytes) as mapped:
            mapped.write(b"x" * size_bytes)
            after = host_memory()
    assert after.shared_memory_bytes >= after.shared_memory_used_bytes
    return after.shared_memory_used_bytes - before.shared_memory_used_bytes


class NvmlError(Exception):
    pass


class Nvml:
    """`used`: memory of the GPU. `processes`: memory by process id, as NVML reports it."""

    NVMLError = NvmlError

    def __init__(self) -> None:
        self.used = 0
        self.processes: dict[int, int | None] = {}
        self.asked: list[str] = []
        self.has_driver = True

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise NvmlError

    def nvmlDeviceGetCount(self) -> int:
        return 8

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"GPU-{index}b2c"

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        self.asked.append(handle)
        return SimpleNamespace(used=self.used)

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes.items()]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    fake = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_nvml_is_asked_each_time_if_it_knows_the_process(nvml: Nvml) -> None:
    outside = OutsideTorch()
    nvml.processes = {os.getpid(): 1_500, 1: 40_000}
    assert outside.measure(1_000) == 500
    nvml.processes[os.getpid()] = 2_700
    assert outside.measure(2_000) == 700
    nvml.has_driver = False
    assert OutsideTorch().measure(1_000) == 0, "nothing is known without a driver"


FOREIGN_WITH_SAME_ID = {os.getpid(): 200}
"""Process ids of the host and of the container can be equal."""


@pytest.mark.parametrize("processes", [{4_000_001: 1_500}, {}, {os.getpid(): None}, FOREIGN_WITH_SAME_ID])
def test_in_a_container_it_is_the_growth_until_the_first_call(nvml: Nvml, processes: dict[int, int | None]) -> None:
    nvml.used, nvml.processes = 20_000, processes
    outside = OutsideTorch()
    nvml.used = 21_500
    assert outside.measure(1_000) == 500
    nvml.used = 60_000
    assert outside.measure(1_000) == 500, "what others take later is not this process's"


@pytest.mark.parametrize(
    ("visible", "asked"),
    [
        (None, "GPU-0b2c"),
        ("3", "GPU-3b2c"),
        ("5,6", "GPU-5b2c"),
        ("GPU-1b2c", "GPU-1b2c"),
        ("GPU-4b,0", "GPU-4b2c"),
        (" 2 , 1", "GPU-2b2c"),
        ("", None),
        ("8", None),
    ],
)
def test_the_gpu_is_the_one_that_cuda_calls_0(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch, visible: str | None, asked: str | None
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    OutsideTorch()
    assert nvml.asked == ([asked] if asked else [])
