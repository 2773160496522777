"""First process of the cluster's machine: sets up the machine, and starts and supervises the programs.

`python -m rljob_cluster.machine_init ROOT BINARIES STARTER` enters the cluster's control group and new namespaces, in
which it is process 1. STARTER is the id of the process that started it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from rljob_cluster import cgroups, cluster_programs, control_plane_programs
from rljob_cluster.api_client import admin_client
from rljob_cluster.commands import run
from rljob_cluster.control_plane_programs import SERVICE_RANGE
from rljob_cluster.errors import ClusterError
from rljob_cluster.layout import CONTROL_PLANE_ADDRESS, NODES, ClusterLayout
from rljob_cluster.machine import UPLINK
from rljob_cluster.supervisor import Supervisor

NAMESPACES = ("--fork", "--pid", "--mount-proc", "--mount", "--net", "--ipc", "--propagation=private", "--kill-child")
# Programs write to these folders regardless of their configuration; each cluster has its own, in memory.
OWN_FOLDERS = ("/run", "/var/lib/cni", "/var/log")
# The kubelet requires these values. Files mounted over /proc/sys satisfy it without changing the machine's settings.
KUBELET_SYSCTLS = {
    "kernel/keys/root_maxbytes": "25000000",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
}
CONTAINERD_SECONDS = 120.0


def main() -> None:
    root, binaries, starter = sys.argv[1:]
    layout = ClusterLayout(Path(root), Path(binaries))
    if os.getpid() == 1:
        boot(layout)
    else:
        cgroups.enter(cgroups.MACHINE)
        # If the starter was killed, the next one may not have seen this process in the group, and starts another one.
        if os.getppid() != int(starter):
            sys.exit(f"process {starter}, which started this one, has exited")
        itself = [sys.executable, "-m", "rljob_cluster.machine_init", root, binaries, starter]
        os.execvp("unshare", ["unshare", *NAMESPACES, "--", *itself])


def boot(layout: ClusterLayout) -> None:
    mount_own_folders()
    hold_sysctls()
    connect()
    supervisor = Supervisor(layout.logs, search_path=f"{layout.binaries}:/usr/sbin:/usr/bin:/sbin:/bin")
    start_control_plane(layout, supervisor)
    start_nodes(layout, supervisor)
    while True:
        supervisor.restart_ended()
        if layout.kwok_config.exists():
            supervisor.ensure("kwok", cluster_programs.kwok(layout))
        time.sleep(0.5)


def start_control_plane(layout: ClusterLayout, supervisor: Supervisor) -> None:
    control_plane = layout.control_plane
    supervisor.ensure("etcd", control_plane_programs.etcd(control_plane))
    for node in NODES:
        supervisor.ensure(f"containerd-{node.name}", cluster_programs.containerd(layout, node))
    supervisor.ensure("kube-apiserver", control_plane_programs.api_server(control_plane))
    admin_client(control_plane).wait_ready(supervisor.restart_ended)
    supervisor.ensure("kube-controller-manager", control_plane_programs.controller_manager(control_plane))
    supervisor.ensure("kube-scheduler", control_plane_programs.scheduler(control_plane))


def start_nodes(layout: ClusterLayout, supervisor: Supervisor) -> None:
    for node in NODES:
        wait_for(layout.node(node).containerd_socket)
        supervisor.ensure(f"kubelet-{node.name}", cluster_programs.kubelet(layout, node))
    supervisor.ensure("kube-proxy", cluster_programs.kube_proxy(layout))
    supervisor.ensure("coredns", cluster_programs.coredns(layout))
    supervisor.ensure("volume-provisioner", cluster_programs.volume_provisioner(layout))


# --- machine ---


def mount_own_folders() -> None:
    # Containers may request mounts with bidirectional propagation.
    run("mount", "--make-rshared", "/")
    for folder in OWN_FOLDERS:
        Path(folder).mkdir(parents=True, exist_ok=True)
        run("mount", "-t", "tmpfs", "tmpfs", folder)


def hold_sysctls() -> None:
    for name, value in KUBELET_SYSCTLS.items():
        held = Path("/run/sysctl", name.replace("/", "."))
        held.parent.mkdir(exist_ok=True)
        held.write_text(f"{value}\n")
        run("mount", "--bind", held, f"/proc/sys/{name}")


def connect() -> None:
    """Wait for the uplink, assign the addresses of control plane and nodes, and enable forwarding between pods."""
    run("ip", "link", "set", "lo", "up")
    while UPLINK not in Path("/proc/net/dev").read_text():
        time.sleep(0.02)
    for address in (CONTROL_PLANE_ADDRESS, *(node.address for node in NODES)):
        run("ip", "address", "add", f"{address}/24", "dev", UPLINK)
    run("ip", "link", "set", UPLINK, "up")
    # Programs of the node can only connect to the address of a Service if there is a route to it.
    run("ip", "route", "add", SERVICE_RANGE, "dev", UPLINK)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def wait_for(path: Path) -> None:
    end = time.monotonic() + CONTAINERD_SECONDS
    while not path.exists():
        if time.monotonic() > end:
            raise ClusterError(f"{path} does not exist after {CONTAINERD_SECONDS:.0f} s")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
