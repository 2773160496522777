"""The cluster's control groups. They are also the record of what belongs to it.

Every process of the cluster, and of its pods, is in a group below /rljob-cluster. The kernel keeps that record: no
crash loses it, and no number of a process that ended long ago is in it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from rljob_cluster.errors import ClusterError
from rljob_cluster.layout import CGROUP, NODES

MOUNT = Path("/sys/fs/cgroup")
MACHINE = f"{CGROUP}/machine"
"""The group of the programs that make up the cluster; those of pods are in their nodes' groups beside it."""
END_SECONDS = 30.0


def create() -> None:
    """Make the groups in which the cluster's programs and its nodes' pods live."""
    for hierarchy in hierarchies(MOUNT):
        for group in (CGROUP, MACHINE, *(f"{CGROUP}/{node.name}" for node in NODES)):
            path = hierarchy / group
            path.mkdir(exist_ok=True)
            _hand_down(path)


def enter(group: str) -> None:
    """Move this process into the group: what it starts is born there."""
    for hierarchy in hierarchies(MOUNT):
        (hierarchy / group / "cgroup.procs").write_text(str(os.getpid()))


def processes(group: str) -> set[int]:
    """The ids of the processes in the group and below it."""
    found: set[int] = set()
    for hierarchy in hierarchies(MOUNT):
        for path in _groups_below(hierarchy / group):
            with contextlib.suppress(OSError):
                found.update(int(line) for line in (path / "cgroup.procs").read_text().split())
    return found


def remove() -> None:
    """Kill every process of the cluster, and remove its groups.

    Raises ClusterError where a process does not end within half a minute.
    """
    end = time.monotonic() + END_SECONDS
    while not _removed():
        for pid in processes(CGROUP):
            _kill(pid)
        if time.monotonic() > end:
            raise ClusterError(f"these processes of the cluster do not exit: {sorted(processes(CGROUP))}")
        time.sleep(0.02)


def hierarchies(mount: Path) -> list[Path]:
    """The one hierarchy of version 2, or every hierarchy of version 1 (links to another are not counted twice)."""
    if (mount / "cgroup.controllers").exists():
        return [mount]
    return sorted(path for path in mount.iterdir() if path.is_dir() and not path.is_symlink())


def _hand_down(group: Path) -> None:
    """Give a new group what its parent has: the CPU set of version 1, the controllers of version 2."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        inherited = group.parent / name
        if inherited.exists() and not (group.parent / "cgroup.subtree_control").exists():
            (group / name).write_text(inherited.read_text())
    controllers = group.parent / "cgroup.controllers"
    if controllers.exists() and controllers.read_text().split():
        wanted = " ".join(f"+{controller}" for controller in controllers.read_text().split())
        (group.parent / "cgroup.subtree_control").write_text(wanted)


def _removed() -> bool:
    for hierarchy in hierarchies(MOUNT):
        for path in _groups_below(hierarchy / CGROUP):
            try:
                path.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                return False
    return True


def _groups_below(group: Path) -> Iterator[Path]:
    """The group and all below it, the deepest first."""
    for path, _, _ in os.walk(group, topdown=False):
        yield Path(path)


def _kill(pid: int) -> None:
    # By a handle, and only if the process is still ours once the handle is held: its number may have been reused.
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            if f"/{CGROUP}" in Path(f"/proc/{pid}/cgroup").read_text():
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        except FileNotFoundError:
            pass
        finally:
            os.close(handle)
