"""The processes of the cluster and of its pods, found on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rljob_cluster import cgroups, machine
from rljob_cluster.layout import CGROUP, NODES
from rljob_cluster.status import components

_SHIM = "containerd-shim-runc-v2"


@dataclass(frozen=True, slots=True)
class RunningProcess:
    """A process with a readable name."""

    name: str
    process: psutil.Process

    def resident_bytes(self) -> int:
        """0 if the process has ended."""
        with suppress(psutil.NoSuchProcess):
            return int(self.process.memory_info().rss)
        return 0

    def kill(self) -> None:
        """Send SIGKILL. A process that has ended is ignored, even if its number is in use again."""
        with suppress(psutil.NoSuchProcess):
            self.process.kill()


def program(name: str) -> list[RunningProcess]:
    """The running programs of the cluster whose name starts with `name`; kubelet, for example, runs once per node."""
    return [found for found in programs() if found.name.startswith(name)]


def programs() -> list[RunningProcess]:
    """The programs of the cluster, by name: `kubelet (cpu-node)`."""
    first = machine.first_process()
    return _running((found.name, found.pid) for found in components(first)) if first else []


def shims() -> list[RunningProcess]:
    """containerd's shims, named by the id of their sandbox."""
    found = []
    for pid in cgroups.processes(cgroups.MACHINE):
        words = command_line(pid)
        if words and Path(words[0]).name == _SHIM and "-id" in words:
            found.append((words[words.index("-id") + 1], pid))
    return _running(sorted(found))


def processes_of_pod(uid: str) -> list[RunningProcess]:
    """All processes of a pod, including its sandbox."""
    pids = {pid for group in groups_of_pods() if group.name == f"pod{uid}" for pid in _processes_in(group)}
    return _running(sorted((name_of(command_line(pid)), pid) for pid in pids))


def groups_of_pods() -> list[Path]:
    """The control group of each pod, in one of the hierarchies."""
    hierarchy = cgroups.hierarchies(cgroups.MOUNT)[0]
    groups = (group for node in NODES for group in sorted(cgroups.groups_below(hierarchy / CGROUP / node.name)))
    return [group for group in groups if group.match("pod*-*")]


def command_line(pid: int) -> list[str]:
    """Empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def name_of(words: list[str]) -> str:
    """A short name of the process: `raylet`, `ray::IDLE`, `rljob: policy-0`, `rljob worker`."""
    if not words or not words[0]:
        return "(ended)"
    if words[0].startswith("rljob: "):
        return words[0].partition(" (")[0]
    if words[0].startswith("ray::"):
        return words[0].partition(".")[0]
    names = [Path(word).name for word in words if not word.startswith("-")]
    if names[0].startswith("python") and len(names) > 1:
        names = names[1:]
    return " ".join(names[:2]) if names[0].startswith("rljob") else names[0]


def _processes_in(group: Path) -> Iterable[int]:
    for each in cgroups.groups_below(group):
        with suppress(OSError):
            yield from map(int, (each / "cgroup.procs").read_text().split())


def _running(found: Iterable[tuple[str, int]]) -> list[RunningProcess]:
    running = []
    for name, pid in found:
        with suppress(psutil.NoSuchProcess):
            running.append(RunningProcess(name, psutil.Process(pid)))
    return running
