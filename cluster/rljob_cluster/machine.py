"""The cluster's machine: one process whose namespaces hold everything that runs, is mounted, and is connected.

Processes, mounts, network interfaces and packet filter rules of the cluster exist in these namespaces only. When the
first process in them ends, in whatever way, the kernel ends all the others and takes the rest away.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from rljob_cluster import cgroups
from rljob_cluster.commands import run
from rljob_cluster.errors import ClusterError
from rljob_cluster.layout import HOST_ADDRESS, ClusterLayout

HOST_LINK = "rljob-cluster"
"""This machine's end of the only link into the cluster."""
UPLINK = "uplink"
START_SECONDS = 10.0


def start(layout: ClusterLayout) -> None:
    """Start the machine, and link it to this one. What it runs comes up by and by."""
    command = [sys.executable, "-m", "rljob_cluster.machine_init", str(layout.root), str(layout.binaries)]
    with (layout.logs / "machine.log").open("ab") as log:
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    first = _wait_for_first_process(layout)
    run("ip", "link", "add", HOST_LINK, "type", "veth", "peer", "name", UPLINK, "netns", str(first))
    run("ip", "address", "add", f"{HOST_ADDRESS}/24", "dev", HOST_LINK)
    run("ip", "link", "set", HOST_LINK, "up")


def unlink() -> None:
    """Remove the link where it is there. The kernel would, but may take its time over it."""
    try:
        run("ip", "link", "delete", HOST_LINK)
    except ClusterError:
        if Path("/sys/class/net", HOST_LINK).exists():
            raise


def first_process() -> int | None:
    """The id, as this machine counts, of the first process in the cluster's namespaces; None where there is none."""
    for pid in cgroups.processes(cgroups.MACHINE):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        if innermost_pid(status) == 1:
            return pid
    return None


def innermost_pid(status: str) -> int:
    """The id that a process has in its own namespace, from the text of its /proc/PID/status."""
    ids = next(line for line in status.splitlines() if line.startswith("NSpid:"))
    return int(ids.split()[-1])


def _wait_for_first_process(layout: ClusterLayout) -> int:
    end = time.monotonic() + START_SECONDS
    while (first := first_process()) is None:
        if time.monotonic() > end:
            raise ClusterError(f"the cluster's machine did not start; see {layout.logs}/machine.log")
        time.sleep(0.02)
    return first
