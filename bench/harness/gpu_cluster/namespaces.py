"""Linux namespaces for the cluster. They end with their first process, which is this program."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from rljob_cluster import cgroups
from rljob_cluster.commands import run
from rljob_cluster.layout import CONTROL_PLANE_ADDRESS
from rljob_cluster.machine_init import hold_sysctls, mount_own_folders

ADDRESS = CONTROL_PLANE_ADDRESS
"""Of the machine, its node, and the pods, which share the node's network."""

CGROUP_ROOT = "/"
"""The kubelet creates its control groups below it."""

_PODS_CGROUP = "kubepods"
_NAMESPACES = ("--fork", "--pid", "--mount-proc", "--mount", "--net", "--propagation=private", "--kill-child")


def in_own_namespaces() -> bool:
    return os.getpid() == 1


def rerun_in_own_namespaces() -> int:
    """Run this program again as the first process of new process, mount and network namespaces; its exit code.

    The kernel keeps only the control groups, which are removed here.
    """
    command = ["unshare", *_NAMESPACES, "--", sys.executable, *sys.orig_argv[1:]]
    done = subprocess.run(["setpriv", "--pdeathsig", "KILL", "--", *command], check=False)
    for hierarchy in cgroups.hierarchies(cgroups.MOUNT):
        for group, _, _ in os.walk(hierarchy / _PODS_CGROUP, topdown=False):
            with suppress(OSError):  # another kubelet of this machine may have pods there
                Path(group).rmdir()
    return done.returncode


def set_up(state: Path, binaries: Path) -> None:
    """Put `binaries` first on PATH, mount `state` in memory, fix the kernel's settings, and give the machine its
    address.

    None of it outlives this process. Raises ClusterError if the machine refuses.
    """
    os.environ["PATH"] = f"{binaries}:{os.environ['PATH']}"
    mount_own_folders()
    hold_sysctls()
    state.mkdir(parents=True, exist_ok=True)
    # The container runtime's overlays work on tmpfs, and not on every disk's file system.
    run("mount", "-t", "tmpfs", "tmpfs", state)
    # A machine may have no `ip` of its own.
    run("busybox", "ip", "link", "set", "lo", "up")
    run("busybox", "ip", "address", "add", f"{ADDRESS}/32", "dev", "lo")
    # Programs find out their own address by looking at the way out.
    run("busybox", "ip", "route", "add", "default", "dev", "lo", "src", ADDRESS)
