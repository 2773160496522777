"""Host memory of a process's container: use and limit of its cgroup, kills by the kernel, /dev/shm."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rljob_memory.sample import MemorySample

_SYS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class CgroupFiles:
    """File names of one version of cgroups."""

    used: str
    limit: str
    events: str
    page_cache: tuple[str, str]
    """Lines of memory.stat with the page cache. Files in memory, such as those of /dev/shm, are not in it."""


_V2 = CgroupFiles("memory.current", "memory.max", "memory.events", ("inactive_file", "active_file"))
_V1 = CgroupFiles(
    "memory.usage_in_bytes",
    "memory.limit_in_bytes",
    "memory.oom_control",
    ("total_inactive_file", "total_active_file"),
)


def host_memory() -> MemorySample:
    """Memory of this process's container and of /dev/shm, as it is now. A number that the system does not report is 0.

    Used memory is without the page cache, which the kernel drops before it kills a process at the limit.
    """
    machine_used, machine_total = _machine()
    used, limit, oom_kills = machine_used, machine_total, 0
    if found := _own_cgroup():
        directory, files = found
        cgroup_limit = _limit(directory, files)
        oom_kills = _lines(directory / files.events).get("oom_kill", 0)
        if 0 < cgroup_limit < machine_total:
            limit = cgroup_limit
            stat = _lines(directory / "memory.stat")
            used = max(_number(directory / files.used) - sum(stat.get(line, 0) for line in files.page_cache), 0)
    shm_used, shm_size = _shared_memory()
    return MemorySample(
        host_used_bytes=used,
        host_limit_bytes=limit,
        oom_kills=oom_kills,
        shared_memory_used_bytes=shm_used,
        shared_memory_bytes=shm_size,
    )


@cache
def _own_cgroup() -> tuple[Path, CgroupFiles] | None:
    """The cgroup of this process if it is visible, else the root that the container shows, which is the same."""
    paths = _cgroup_paths()
    for root, path, files in ((_SYS, paths.get(""), _V2), (_SYS / "memory", paths.get("memory"), _V1)):
        for directory in (root / (path or "").lstrip("/"), root):
            if (directory / files.used).exists():
                return directory, files
    return None


def _cgroup_paths() -> dict[str, str]:
    """Path by controller, of /proc/self/cgroup; version 2 has the name ""."""
    paths = {}
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                paths[controller] = path
    return paths


def _limit(directory: Path, files: CgroupFiles) -> int:
    """The lowest limit of the cgroup and of those that contain it; 0 if none is set."""
    within = [directory, *(parent for parent in directory.parents if parent.is_relative_to(_SYS))]
    limits = [limit for parent in within if (limit := _number(parent / files.limit))]
    return min(limits, default=0)


def _machine() -> tuple[int, int]:
    """Used and total, in bytes."""
    found = _lines(Path("/proc/meminfo"))
    total = found.get("MemTotal:", 0) * 1024
    return max(total - found.get("MemAvailable:", 0) * 1024, 0), total


def _shared_memory() -> tuple[int, int]:
    try:
        shm = os.statvfs("/dev/shm")
    except OSError:
        return 0, 0
    return (shm.f_blocks - shm.f_bfree) * shm.f_frsize, shm.f_blocks * shm.f_frsize


def _number(path: Path) -> int:
    """0 for `max`, and if there is no such file."""
    with suppress(OSError, ValueError):
        return int(path.read_text(encoding="utf-8"))
    return 0


def _lines(path: Path) -> dict[str, int]:
    """The number after the first word of each line; empty if there is no such file."""
    with suppress(OSError, ValueError):
        return {
            words[0]: int(words[1])
            for line in path.read_text(encoding="utf-8").splitlines()
            if len(words := line.split()) > 1
        }
    return {}
