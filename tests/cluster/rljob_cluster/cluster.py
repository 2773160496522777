"""Start and stop of the cluster."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import yaml

from rljob_cluster import cgroups, machine, node_programs
from rljob_cluster.api_client import StartupClient, admin_client
from rljob_cluster.binaries import KWOK, MODULES, SOURCES, build
from rljob_cluster.commands import ClusterError, ProgressLines, run
from rljob_cluster.control_plane_programs import write_credentials
from rljob_cluster.images import load_archive, write_pause_archive
from rljob_cluster.layout import CONTROL_PLANE_ADDRESS, NODES, ClusterLayout, Node
from rljob_cluster.node_programs import DNS_HEALTH_PORT, GPU_LABELS, PROXY_HEALTH_PORT
from rljob_cluster.status import GPU_RESOURCE, reports_ready

MANIFESTS = Path(__file__).parent / "manifests"
START_SECONDS = 240.0
ANSWER_SECONDS = 60.0
"""Time for the API server of a running cluster to answer. Without an answer, `up` replaces the cluster."""


def up(layout: ClusterLayout, progress: ProgressLines) -> None:
    """Start the cluster. If it is running already, only add its missing parts.

    Raises ClusterError if the machine lacks a requirement or a part does not start.
    """
    require_root("starting a cluster (containers, cgroups, network interfaces)")
    require_packages()
    build(MODULES, layout.binaries, progress)
    with held(layout.lock):
        if not api_answers(layout):
            take_down(layout)
            with progress.step("starting the control plane"):
                start_machine(layout)
        with progress.step("waiting for nodes, Services and DNS"):
            complete(layout)
    progress.say(f"the cluster is up\nkubectl:    {layout.binaries}/kubectl\nkubeconfig: {layout.kubeconfig}")


def down(layout: ClusterLayout, progress: ProgressLines, *, images: bool) -> None:
    """Stop the cluster and remove its state. Its programs are kept, and its images too unless `images` is true."""
    require_root("stopping a cluster")
    with held(layout.lock), progress.step("stopping the cluster"):
        take_down(layout)
        if images:
            shutil.rmtree(layout.images, ignore_errors=True)


def start_machine(layout: ClusterLayout) -> None:
    """Start all programs. Returns when the API server is ready."""
    write_files(layout)
    cgroups.create()
    machine.start(layout)
    admin_client(layout.control_plane).wait_ready(lambda: check_machine(layout))


def complete(layout: ClusterLayout) -> None:
    """Add the missing parts of a running cluster. Returns when pods can be created and run."""
    client = admin_client(layout.control_plane)
    install_addons(layout)
    load_archive(layout, write_pause_archive(layout))
    for node in NODES:
        wait_until(f"node {node.name} registers", partial(give_gpus, client, node), layout)
    for node in NODES:
        wait_until(f"node {node.name} is Ready", partial(is_ready, client, node), layout)
    wait_until("Services are reachable", partial(answers, PROXY_HEALTH_PORT, "healthz"), layout)
    wait_until("the cluster's DNS answers", partial(answers, DNS_HEALTH_PORT, "ready"), layout)
    wait_until("pods can be created", partial(has_service_account, client), layout)


def take_down(layout: ClusterLayout) -> None:
    """Stop and remove all parts of the cluster that exist, also those of an incomplete start."""
    cgroups.remove()
    machine.unlink()
    shutil.rmtree(layout.state, ignore_errors=True)


def write_files(layout: ClusterLayout) -> None:
    layout.logs.mkdir(parents=True)
    layout.state.chmod(0o700)
    layout.volumes.mkdir()
    write_credentials(layout.control_plane)
    authority, url = layout.control_plane.authority, layout.control_plane.url
    users = {
        "kube-proxy": node_programs.PROXY_USER,
        "coredns": node_programs.DNS_USER,
        "volume-provisioner": node_programs.VOLUME_PROVISIONER_USER,
    }
    for name, user in users.items():
        authority.kubeconfig(layout.control_plane.kubeconfig(name), url, user)
    layout.corefile.write_text(node_programs.corefile(layout))
    for node in NODES:
        files = layout.node(node)
        files.cni_config.mkdir(parents=True)
        kubeconfig = layout.control_plane.kubeconfig(node.name)
        authority.kubeconfig(kubeconfig, url, f"system:node:{node.name}", "system:nodes")
        files.containerd_config.write_text(node_programs.containerd_config(layout, node))
        files.kubelet_config.write_text(node_programs.kubelet_config(layout, node))
        (files.cni_config / "pods.conflist").write_text(node_programs.cni_config(layout, node))


def install_addons(layout: ClusterLayout) -> None:
    kubectl = (layout.binaries / "kubectl", "--kubeconfig", layout.kubeconfig)
    run(*kubectl, "apply", "--server-side", "--field-manager=rljob-cluster", "-f", MANIFESTS / "addons.yaml")


def give_gpus(client: StartupClient, node: Node) -> bool:
    """Set the GPUs in the status of the node, whose kubelet finds none. Returns False if the node does not exist."""
    found = {GPU_RESOURCE: str(node.gpus)} if node.gpus else {}
    return client.merge(f"/api/v1/nodes/{node.name}/status", {"status": {"capacity": found, "allocatable": found}})


# --- readiness ---


def require_up(layout: ClusterLayout) -> None:
    """Raises ClusterError if no cluster is running."""
    require_root("changing a cluster's nodes")
    if machine.first_process() is None or not layout.kubeconfig.exists():
        raise ClusterError("expected a running cluster, found none: run `python -m rljob_cluster up`")


def api_answers(layout: ClusterLayout) -> bool:
    """Returns True if the API server is ready. A busy machine may delay its answer."""
    if machine.first_process() is None or not machine.is_linked() or not layout.kubeconfig.exists():
        return False
    try:
        admin_client(layout.control_plane).wait_ready(lambda: check_machine(layout), ANSWER_SECONDS)
    except ClusterError:
        return False
    return True


def is_ready(client: StartupClient, node: Node) -> bool:
    answer = client.get(f"/api/v1/nodes/{node.name}")
    return answer is not None and reports_ready(json.loads(answer))


def answers(port: int, path: str) -> bool:
    """Returns True if a health endpoint of the control plane's machine responds with 200."""
    try:
        with urlopen(f"http://{CONTROL_PLANE_ADDRESS}:{port}/{path}", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def has_service_account(client: StartupClient) -> bool:
    return client.get("/api/v1/namespaces/default/serviceaccounts/default") is not None


def check_machine(layout: ClusterLayout) -> None:
    if machine.first_process() is None:
        raise ClusterError(f"the cluster's machine exited; see {layout.logs}/machine.log")


def wait_until(what: str, holds: Callable[[], bool], layout: ClusterLayout) -> None:
    end = time.monotonic() + START_SECONDS
    while not holds():
        check_machine(layout)
        if time.monotonic() > end:
            raise ClusterError(f"expected within {START_SECONDS:.0f} s: {what}; the logs are in {layout.logs}")
        time.sleep(0.1)


@contextmanager
def held(lock: Path) -> Iterator[None]:
    """Hold the lock, after any other process that starts or stops the cluster. The kernel releases it on exit."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


# Requirements of a cluster on the machine, other than Python and Go.

SEARCH_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
CNI_PLUGINS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
PROGRAMS = {
    "ip": "iproute2",
    "iptables": "iptables",
    "mount": "mount",
    "runc": "runc",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}


def require_root(what: str) -> None:
    """Raises ClusterError if this process does not run as root."""
    if os.geteuid() != 0:
        raise ClusterError(
            f"{what} needs root; this process has user id {os.geteuid()}. Run it with sudo. "
            "`build` and `control-plane` work without."
        )


def require_packages() -> None:
    """Raises ClusterError with the command that installs missing packages."""
    if missing := missing_packages():
        raise ClusterError(
            f"this machine lacks {', '.join(missing)}. On Debian and Ubuntu: apt-get install {' '.join(missing)}"
        )


def missing_packages() -> list[str]:
    """Debian packages whose programs are missing."""
    missing = {package for program, package in PROGRAMS.items() if not shutil.which(program, path=SEARCH_PATH)}
    if not any((folder / "ptp").exists() for folder in CNI_PLUGINS):
        missing.add("containernetworking-plugins")
    return sorted(missing)


# Nodes without a machine, for tests of scale: KWOK simulates their kubelets. A taint keeps other pods away.

TAINT = "kwok.x-k8s.io/node"
# A node becomes and stays Ready; a pod becomes ready, completes and is deleted.
STAGES = ("node/fast", "node/heartbeat-with-lease", "pod/fast")


def add_fake_nodes(layout: ClusterLayout, count: int, progress: ProgressLines) -> None:
    """Ensure that at least `count` fake nodes exist, every second one with eight GPUs."""
    build([KWOK], layout.binaries, progress)
    with progress.step(f"adding {count} fake nodes"):
        if not layout.kwok_config.exists():
            layout.kwok_config.write_text(stages())
        manifest = yaml.safe_dump_all([fake_node(position) for position in range(count)])
        kubectl = (layout.binaries / "kubectl", "--kubeconfig", layout.kubeconfig)
        run(*kubectl, "apply", "--server-side", "-f", "-", input=manifest.encode())


def fake_node(position: int) -> dict[str, Any]:
    name = f"fake-{position:03}"
    gpus = 8 * (position % 2)
    resources = {"cpu": "128", "memory": "1Ti", "pods": "1000"} | ({GPU_RESOURCE: str(gpus)} if gpus else {})
    labels = {"kubernetes.io/hostname": name, "type": "kwok"} | (GPU_LABELS if gpus else {})
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels, "annotations": {TAINT: "fake"}},
        "spec": {"taints": [{"key": TAINT, "value": "fake", "effect": "NoSchedule"}]},
        "status": {"capacity": resources, "allocatable": resources},
    }


def stages() -> str:
    """Stages from the Go module of KWOK."""
    downloaded = run("go", "-C", SOURCES / KWOK.name, "mod", "download", "-json", "sigs.k8s.io/kwok")
    folder = Path(json.loads(downloaded)["Dir"]) / "kustomize" / "stage"
    files = [file for stage in STAGES for file in sorted((folder / stage).glob("*.yaml"))]
    return "---\n".join(file.read_text() for file in files if file.name != "kustomization.yaml")
