"""The test cluster starts and stops cleanly, also after failures. Some tests stop it and start it again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rljob_cluster import cgroups, machine
from rljob_cluster import cluster as cluster_module
from rljob_cluster.commands import ProgressLines
from rljob_cluster.layout import CGROUP, ClusterLayout
from rljob_cluster.machine_init import KUBELET_SYSCTLS
from rljob_cluster.status import Component, components, reports_ready
from rljob_testing.cluster import AdminKubectl
from rljob_testing.patience import EFFECT_SECONDS, Deadline

RESTRICTED_POD = {
    "runAsNonRoot": True,
    "runAsUser": 10001,
    "runAsGroup": 10001,
    "fsGroup": 10001,
    "seccompProfile": {"type": "RuntimeDefault"},
}
RESTRICTED_CONTAINER = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def shell_pod(name: str, image: str, script: str) -> dict[str, Any]:
    """A pod whose one container, `shell`, runs the script."""
    container: dict[str, Any] = {
        "name": "shell",
        "image": image,
        "args": [script],
        "securityContext": RESTRICTED_CONTAINER,
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "securityContext": RESTRICTED_POD,
        "containers": [container],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": spec}


def phase(pod: dict[str, Any]) -> str:
    return str(pod["status"].get("phase", ""))


COMMAND = [sys.executable, "-m", "rljob_cluster"]
PROGRESS = ProgressLines(Console(stderr=True))


@pytest.fixture(autouse=True, scope="module")
def left_up(cluster: ClusterLayout) -> Iterator[None]:
    yield
    cluster_module.up(cluster, PROGRESS)


def test_ending_the_cluster_leaves_only_programs_and_images(
    cluster: ClusterLayout, kubectl: AdminKubectl, busybox: str
) -> None:
    cluster_module.down(cluster, PROGRESS, images=False)
    before, kept = machine_state(), {path.name for path in cluster.root.iterdir()}
    assert cluster.state.name not in kept
    cluster_module.up(cluster, PROGRESS)
    kubectl.apply(shell_pod("running", busybox, "sleep 600"))
    kubectl.wait("pod", "running", lambda pod: phase(pod) == "Running")
    cluster_module.down(cluster, PROGRESS, images=False)
    assert machine_state() == before
    assert {path.name for path in cluster.root.iterdir()} == kept


def test_a_cluster_whose_processes_were_all_killed_comes_up_again(
    cluster: ClusterLayout, kubectl: AdminKubectl
) -> None:
    cluster_module.up(cluster, PROGRESS)
    for pid in cgroups.processes(CGROUP):
        # Once the first of all is gone, the kernel ends the others.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: machine.first_process() is None)
    cluster_module.up(cluster, PROGRESS)
    assert ready_nodes(kubectl) == {"cpu-node", "gpu-node"}


@pytest.mark.parametrize("seconds", [1.0, 4.0])
def test_an_interrupted_start_is_made_good_by_the_next(
    cluster: ClusterLayout, kubectl: AdminKubectl, seconds: float
) -> None:
    cluster_module.down(cluster, PROGRESS, images=False)
    interrupted = subprocess.Popen([*COMMAND, "up"], stdout=subprocess.DEVNULL)
    time.sleep(seconds)
    interrupted.kill()
    interrupted.wait()
    cluster_module.up(cluster, PROGRESS)
    assert ready_nodes(kubectl) == {"cpu-node", "gpu-node"}


# --- what there is on this machine ---


def machine_state() -> dict[str, object]:
    """All that a cluster could leave behind."""
    sysctls = {name: Path("/proc/sys", name).read_text() for name in KUBELET_SYSCTLS}
    return {
        "links": {path.name for path in Path("/sys/class/net").iterdir()},
        "routes": printed("ip", "route"),
        "rules": printed("iptables-save", "-t", "nat") + printed("iptables-save", "-t", "filter"),
        "mounts": [line for line in Path("/proc/mounts").read_text().splitlines() if "rljob/cluster" in line],
        "cgroups": {path for path in cgroups.groups_below(cgroups.MOUNT) if path.name == CGROUP},
        "namespaces": {path.name for path in Path("/run/netns").glob("*")},
        "processes": present(),
        "sysctls": sysctls | {"ip_forward": Path("/proc/sys/net/ipv4/ip_forward").read_text()},
        "folders": [Path(folder).exists() for folder in ("/run/containerd", "/run/runc", "/var/lib/kubelet")],
    }


def printed(*command: str) -> list[str]:
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    # Comments and counters tell the time of asking.
    return [line for line in lines if not line.startswith(("#", ":"))]


def present() -> list[Component]:
    first = machine.first_process()
    return components(first) if first else []


def ready_nodes(kubectl: AdminKubectl) -> set[str]:
    nodes = json.loads(kubectl("get", "nodes", "-o", "json"))["items"]
    return {node["metadata"]["name"] for node in nodes if reports_ready(node)}


def wait_until(holds: Callable[[], bool], seconds: float = EFFECT_SECONDS) -> None:
    deadline = Deadline(seconds)
    while not holds():
        assert not deadline.passed, f"not so after {seconds:.0f} s"
        time.sleep(0.1)
