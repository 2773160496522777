"""The machine's memory as a process's container has it: use and limit of its cgroup, kills by the kernel, /dev/shm."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_SYS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class CgroupFiles:
    """The names of one version's files. `reclaimable`: the line of `stat` with what the kernel can drop at once."""

    used: str
    limit: str
    events: str
    reclaimable: str


_V2 = CgroupFiles("memory.current", "memory.max", "memory.events", "inactive_file")
_V1 = CgroupFiles("memory.usage_in_bytes", "memory.limit_in_bytes", "memory.oom_control", "total_inactive_file")


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes. `used` is the working set as the kubelet counts it: without the page cache that can be dropped at once.

    `limit`: of the cgroup, or the machine's memory where no limit is lower. `oom_kills`: processes of the cgroup that
    the kernel has killed for its memory, ever. `shm_…`: of /dev/shm.
    """

    used: int = 0
    limit: int = 0
    oom_kills: int = 0
    shm_used: int = 0
    shm_size: int = 0


def host_memory() -> HostMemory:
    """As it is now. What this system does not tell is 0."""
    machine_used, machine_total = _machine()
    used, limit, oom_kills = machine_used, machine_total, 0
    if found := _own_cgroup():
        directory, files = found
        cgroup_limit = _limit(directory, files)
        oom_kills = _lines(directory / files.events).get("oom_kill", 0)
        if 0 < cgroup_limit < machine_total:
            limit = cgroup_limit
            reclaimable = _lines(directory / "memory.stat").get(files.reclaimable, 0)
            used = max(_number(directory / files.used) - reclaimable, 0)
    return HostMemory(used, limit, oom_kills, *_shared_memory())


@cache
def _own_cgroup() -> tuple[Path, CgroupFiles] | None:
    """The cgroup of this process, where it can be seen; else the root that the container shows, which is the same."""
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
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                paths[controller] = path
    return paths


def _limit(directory: Path, files: CgroupFiles) -> int:
    """The lowest of the cgroup and of those that it lies in; 0 where none is set."""
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
    """0 for `max`, and where there is no such file."""
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return 0


def _lines(path: Path) -> dict[str, int]:
    """The number after the first word of each line; empty where there is no such file."""
    with suppress(OSError, ValueError):
        return {words[0]: int(words[1]) for line in path.read_text().splitlines() if len(words := line.split()) > 1}
    return {}
