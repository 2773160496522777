"""The cluster's machine: a process with its own namespaces.

All processes, mounts, network interfaces and packet filter rules of the cluster are in these namespaces. When the first
process exits for any reason, the kernel kills the others and removes the namespaces.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from rljob_cluster import cgroups
from rljob_cluster.commands import ClusterError, run
from rljob_cluster.layout import HOST_ADDRESS, ClusterLayout

HOST_LINK = "rljob-cluster"
"""Network interface of this machine that leads into the cluster, the only one."""
UPLINK = "uplink"
START_SECONDS = 120.0


def start(layout: ClusterLayout) -> None:
    """Start the machine and connect it to this one. Its programs start later."""
    command = [
        sys.executable,
        "-m",
        "rljob_cluster.machine_init",
        str(layout.root),
        str(layout.binaries),
        str(os.getpid()),
    ]
    with (layout.logs / "machine.log").open("ab") as log:
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    first = _wait_for_first_process(layout)
    run("ip", "link", "add", HOST_LINK, "type", "veth", "peer", "name", UPLINK, "netns", str(first))
    run("ip", "address", "add", f"{HOST_ADDRESS}/24", "dev", HOST_LINK)
    run("ip", "link", "set", HOST_LINK, "up")


def unlink() -> None:
    """Remove the network interface if it exists. The kernel also removes it, but possibly late."""
    try:
        run("ip", "link", "delete", HOST_LINK)
    except ClusterError:
        if is_linked():
            raise


def is_linked() -> bool:
    """Returns True if the network interface exists. Without it, the cluster cannot be reached, and waits for it."""
    return Path("/sys/class/net", HOST_LINK).exists()


def first_process() -> int | None:
    """Process id, on this machine, of the first process in the cluster's namespaces; None if it does not exist."""
    for pid in cgroups.processes(cgroups.MACHINE):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        if innermost_pid(status) == 1:
            return pid
    return None


def innermost_pid(status: str) -> int:
    """Id of a process in its own namespace, from the text of /proc/PID/status."""
    ids = next(line for line in status.splitlines() if line.startswith("NSpid:"))
    return int(ids.split()[-1])


def _wait_for_first_process(layout: ClusterLayout) -> int:
    end = time.monotonic() + START_SECONDS
    while (first := first_process()) is None:
        if time.monotonic() > end:
            raise ClusterError(f"the cluster's machine did not start; see {layout.logs}/machine.log")
        time.sleep(0.02)
    return first
