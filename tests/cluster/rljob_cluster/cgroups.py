"""Control groups of the cluster, which also record its processes.

Every process of the cluster and of its pods is in a group below /rljob-cluster. The kernel keeps this record: it
survives crashes and never lists a process that has exited.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from rljob_cluster.commands import ClusterError
from rljob_cluster.layout import CGROUP, NODES

MOUNT = Path("/sys/fs/cgroup")
MACHINE = f"{CGROUP}/machine"
"""Group of the programs of the cluster. Pods are in the groups of their nodes, next to it."""
END_SECONDS = 120.0


def create() -> None:
    """Create the groups of the cluster's programs and of the pods of each node."""
    for hierarchy in hierarchies(MOUNT):
        for group in (CGROUP, MACHINE, *(f"{CGROUP}/{node.name}" for node in NODES)):
            path = hierarchy / group
            path.mkdir(exist_ok=True)
            _hand_down(path)


def enter(group: str) -> None:
    """Move this process into the group. Its child processes start in the same group."""
    for hierarchy in hierarchies(MOUNT):
        (hierarchy / group / "cgroup.procs").write_text(str(os.getpid()))


def processes(group: str) -> set[int]:
    """Ids of the processes in the group and in the groups below it."""
    found: set[int] = set()
    for hierarchy in hierarchies(MOUNT):
        for path in groups_below(hierarchy / group):
            with contextlib.suppress(OSError):
                found.update(int(line) for line in (path / "cgroup.procs").read_text().split())
    return found


def remove() -> None:
    """Kill every process of the cluster, and remove its groups.

    Raises ClusterError if a process does not exit within two minutes.
    """
    end = time.monotonic() + END_SECONDS
    while not _removed():
        for pid in processes(CGROUP):
            _kill(pid)
        if time.monotonic() > end:
            raise ClusterError(f"these processes of the cluster do not exit: {sorted(processes(CGROUP))}")
        time.sleep(0.02)


def hierarchies(mount: Path) -> list[Path]:
    """The single hierarchy of cgroup v2, or all hierarchies of cgroup v1 without symbolic links."""
    if (mount / "cgroup.controllers").exists():
        return [mount]
    return sorted(path for path in mount.iterdir() if path.is_dir() and not path.is_symlink())


def _hand_down(group: Path) -> None:
    """Pass the settings of the parent to a new group: the CPU set in cgroup v1, the controllers in cgroup v2."""
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
        for path in groups_below(hierarchy / CGROUP):
            try:
                path.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                return False
    return True


def groups_below(group: Path) -> Iterator[Path]:
    """The group and all groups below it, deepest first. Path.glob would fail if one of them is removed."""
    for path, _, _ in os.walk(group, topdown=False):
        yield Path(path)


def _kill(pid: int) -> None:
    # The id may have been reused: open a handle first, then check that the process belongs to the cluster.
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            if f"/{CGROUP}" in Path(f"/proc/{pid}/cgroup").read_text():
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        except FileNotFoundError:
            pass
        finally:
            os.close(handle)
