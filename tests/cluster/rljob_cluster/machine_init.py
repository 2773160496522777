"""First process of the cluster's machine: sets up the machine, and starts and supervises the programs.

`python -m rljob_cluster.machine_init ROOT BINARIES STARTER` enters the cluster's control group and new namespaces, in
which it is process 1. STARTER is the id of the process that started it.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from rljob_cluster import cgroups, control_plane_programs, node_programs
from rljob_cluster.api_client import admin_client
from rljob_cluster.commands import ClusterError, run
from rljob_cluster.control_plane_programs import SERVICE_RANGE
from rljob_cluster.layout import CONTROL_PLANE_ADDRESS, NODES, ClusterLayout
from rljob_cluster.machine import UPLINK

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
            supervisor.ensure("kwok", node_programs.kwok(layout))
        time.sleep(0.5)


def start_control_plane(layout: ClusterLayout, supervisor: Supervisor) -> None:
    control_plane = layout.control_plane
    supervisor.ensure("etcd", control_plane_programs.etcd(control_plane))
    for node in NODES:
        supervisor.ensure(f"containerd-{node.name}", node_programs.containerd(layout, node))
    supervisor.ensure("kube-apiserver", control_plane_programs.api_server(control_plane))
    admin_client(control_plane).wait_ready(supervisor.restart_ended)
    supervisor.ensure("kube-controller-manager", control_plane_programs.controller_manager(control_plane))
    supervisor.ensure("kube-scheduler", control_plane_programs.scheduler(control_plane))


def start_nodes(layout: ClusterLayout, supervisor: Supervisor) -> None:
    for node in NODES:
        wait_for(layout.node(node).containerd_socket)
        supervisor.ensure(f"kubelet-{node.name}", node_programs.kubelet(layout, node))
    supervisor.ensure("kube-proxy", node_programs.kube_proxy(layout))
    supervisor.ensure("coredns", node_programs.coredns(layout))
    supervisor.ensure("volume-provisioner", node_programs.volume_provisioner(layout))


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


# Supervision of programs, as by a machine's init process.

RESTART_SECONDS = 1.0
"""Minimum seconds between two starts of a program."""


@dataclass(slots=True)
class Supervised:
    command: list[str]
    pid: int | None
    started: float


@dataclass(slots=True)
class Supervisor:
    """Starts programs, each with its own log, restarts programs that exit, and reaps orphaned processes."""

    logs: Path
    search_path: str
    _programs: dict[str, Supervised] = field(default_factory=dict, init=False)

    def ensure(self, name: str, command: list[str]) -> None:
        """Start the program unless it is supervised already."""
        if name not in self._programs:
            self._programs[name] = Supervised(command, self._spawn(name, command), time.monotonic())

    def restart_ended(self) -> None:
        """Reap processes that exited, and restart programs that are due. Does not wait."""
        for pid, status in _ended():
            for name, program in self._programs.items():
                if program.pid == pid:
                    program.pid = None
                    print(f"{name} (process {pid}) exited with code {os.waitstatus_to_exitcode(status)}", flush=True)
        for name, program in self._programs.items():
            if program.pid is None and time.monotonic() - program.started >= RESTART_SECONDS:
                program.pid, program.started = self._spawn(name, program.command), time.monotonic()

    def _spawn(self, name: str, command: list[str]) -> int:
        log = os.open(self.logs / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            output = [(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
            environment = {"PATH": self.search_path, "HOME": "/root"}
            return os.posix_spawn(command[0], command, environment, file_actions=output, setsid=True)
        finally:
            os.close(log)


def _ended() -> list[tuple[int, int]]:
    """Processes that exited since the last call, with their wait status."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, status))


if __name__ == "__main__":
    main()
