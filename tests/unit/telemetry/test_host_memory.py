"""Memory of the container, from the files of cgroup v1 and v2."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rljob_memory.sample import MemorySample
from rljob_testing.patience import PATIENCE_SECONDS, Deadline
from rljob_trainer.telemetry import host_memory as module
from rljob_trainer.telemetry.host_memory import host_memory

MIB = 1 << 20
GIB = 1 << 30

Tree = Callable[[dict[str, str], dict[str, str]], MemorySample]


@pytest.fixture
def in_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tree]:
    """Lays out `files` under /sys/fs/cgroup, with the process at `paths` (by controller), and reads them."""

    def read(paths: dict[str, str], files: dict[str, str]) -> MemorySample:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        monkeypatch.setattr(module, "_SYS", tmp_path)
        monkeypatch.setattr(module, "_cgroup_paths", lambda: paths)
        monkeypatch.setattr(module, "_machine", lambda: (5 * GIB, 64 * GIB))
        module._own_cgroup.cache_clear()
        return host_memory()

    yield read
    module._own_cgroup.cache_clear()


STAT = "anon 3000000\nfile 900000\ninactive_file 1048576\nactive_file 7\n"


def test_version_2_gives_the_working_set_the_limit_and_the_kernels_kills(in_cgroup: Tree) -> None:
    memory = in_cgroup(
        {"": "/kubepods/pod1/main"},
        {
            "kubepods/pod1/main/memory.current": f"{3 * GIB}\n",
            "kubepods/pod1/main/memory.max": f"{4 * GIB}\n",
            "kubepods/pod1/main/memory.stat": STAT,
            "kubepods/pod1/main/memory.events": "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n",
        },
    )
    assert (memory.host_used_bytes, memory.host_limit_bytes, memory.oom_kills) == (3 * GIB - MIB, 4 * GIB, 2)


def test_the_lowest_limit_on_the_way_up_counts(in_cgroup: Tree) -> None:
    memory = in_cgroup(
        {"": "/pod/main"},
        {
            "pod/main/memory.current": f"{GIB}",
            "pod/main/memory.max": "max\n",
            "pod/main/memory.stat": STAT,
            "pod/memory.max": f"{2 * GIB}",
        },
    )
    assert (memory.host_used_bytes, memory.host_limit_bytes) == (GIB - MIB, 2 * GIB)


def test_version_1_gives_the_same_numbers_from_other_files(in_cgroup: Tree) -> None:
    memory = in_cgroup(
        {"": "/", "memory": "/docker/abc"},
        {
            "memory/memory.usage_in_bytes": f"{GIB}",  # The container sees its own cgroup as the root.
            "memory/memory.limit_in_bytes": f"{2 * GIB}",
            "memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {MIB}\n",
            "memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
        },
    )
    assert (memory.host_used_bytes, memory.host_limit_bytes, memory.oom_kills) == (GIB - MIB, 2 * GIB, 1)


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_without_a_limit_the_machine_counts(in_cgroup: Tree, limit: str) -> None:
    memory = in_cgroup({"": "/"}, {"memory.current": f"{GIB}", "memory.max": limit, "memory.stat": STAT})
    assert (memory.host_used_bytes, memory.host_limit_bytes) == (5 * GIB, 64 * GIB)


def test_without_cgroups_the_machine_counts(in_cgroup: Tree) -> None:
    memory = in_cgroup({}, {})
    assert (memory.host_used_bytes, memory.host_limit_bytes, memory.oom_kills) == (5 * GIB, 64 * GIB, 0)


def test_this_machine_has_some_memory_in_use_and_a_limit() -> None:
    memory = host_memory()
    assert 0 < memory.host_used_bytes < memory.host_limit_bytes


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs a /dev/shm")
def test_files_in_shared_memory_are_counted() -> None:
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
