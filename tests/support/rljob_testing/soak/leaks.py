"""Finds objects, processes and files whose pod, container or job is gone, on both nodes and in the cluster."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_cluster import machine
from rljob_cluster.commands import ClusterError, run
from rljob_cluster.layout import NODES, Node
from rljob_operator.names import CONTROLLER_SERVICE, RENDEZVOUS_SERVICE, SHARED_ACCOUNT
from rljob_testing.soak import processes
from rljob_testing.soak.cluster import NAMESPACE, SoakCluster, claim_of, folder_of

_SHARED_BY_JOBS = (
    f"serviceaccount/{SHARED_ACCOUNT}",
    f"role.rbac.authorization.k8s.io/{SHARED_ACCOUNT}",
    f"rolebinding.rbac.authorization.k8s.io/{SHARED_ACCOUNT}",
    f"service/{CONTROLLER_SERVICE}",
    f"service/{RENDEZVOUS_SERVICE}",
)
_STAY_IN_A_NAMESPACE = {"configmap/kube-root-ca.crt", "serviceaccount/default", *_SHARED_BY_JOBS}
_OF_SHARED_SERVICES = re.compile(
    rf"endpoints/({CONTROLLER_SERVICE}|{RENDEZVOUS_SERVICE})"
    rf"|endpointslice\.discovery\.k8s\.io/({CONTROLLER_SERVICE}|{RENDEZVOUS_SERVICE})-\w+"
)
"""Written by Kubernetes for the Services that stay."""
_POD_UID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_CONTAINER_ID = re.compile(r"\b[0-9a-f]{64}\b")
_SNAPSHOTS = "io.containerd.snapshotter.v1.overlayfs/snapshots"
_GARBAGE = "rljob-soak-garbage"
"""Name of the snapshot and the lease that are removed so that containerd collects its garbage."""
_USER_OF_PODS = 10001
_SHARED_FOLDERS = (Path("/tmp"), Path("/dev/shm"))
"""Folders of which each pod has its own. A pod's file in the machine's folder means that isolation failed."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container of containerd."""

    id: str
    pod_uid: str
    network: str
    """Name of its network namespace's file; empty if it has none."""

    @classmethod
    def of(cls, info: dict[str, Any]) -> Container:
        """Parse the output of `ctr containers info`."""
        namespaces = info["Spec"]["linux"]["namespaces"]
        network = next((found.get("path", "") for found in namespaces if found["type"] == "network"), "")
        return cls(info["ID"], info["Labels"].get("io.kubernetes.pod.uid", ""), Path(network).name)


def find_leaks(cluster: SoakCluster) -> set[str]:
    """All present leaks, one line each. Raises ApiServerAway, and ClusterError if containerd is away."""
    uids = {pod["metadata"]["uid"] for pod in cluster.list_items("/api/v1/pods")}
    containers = {container.id: container for node in NODES for container in _containers(cluster, node)}
    networks = {container.network for container in containers.values()}
    return {
        *_objects(cluster),
        *_volumes(cluster),
        *(f"container {found.id[:12]}" for found in containers.values() if found.pod_uid not in uids),
        *(f"{what} of pod {uid}" for what, uid in _of_pods(cluster) if uid not in uids),
        *(f"{what} of container {id_[:12]}" for what, id_ in _of_containers(cluster) if id_ not in containers),
        *(line for node in NODES for line in _folders_of_no_snapshot(cluster, node)),
        *(f"network {name}" for name in _network_namespaces() if name not in networks),
        *(f"{path}, a pod's file" for folder in _SHARED_FOLDERS for path in _files_of_pods(folder)),
    }


def used_bytes(cluster: SoakCluster) -> int:
    """Disk in use by the nodes' folders and the volumes, without images and without the leaks of `find_leaks`."""
    folders = (cluster.layout.state / "nodes", cluster.layout.volumes)
    return sum(_size(Path(root, file)) for folder in folders for root, _, files in os.walk(folder) for file in files)


def ids_in(text: str, pattern: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Each line that contains an id, with that id."""
    for line in text.splitlines():
        if found := pattern.search(line):
            yield line, found[0]


# --- in the cluster ---


def _objects(cluster: SoakCluster) -> set[str]:
    kinds = cluster.kubectl("api-resources", "--namespaced", "--verbs=list", "-o", "name").split()
    listed = ",".join(kind for kind in kinds if not kind.startswith("events"))
    names = set(cluster.kubectl("get", listed, "-o", "name").split()) - _STAY_IN_A_NAMESPACE
    return {name for name in names if not _OF_SHARED_SERVICES.fullmatch(name)}


def _volumes(cluster: SoakCluster) -> Iterator[str]:
    volumes = cluster.volumes()
    yield from (f"volume {volume['metadata']['name']}" for volume in volumes if claim_of(volume)[0] == NAMESPACE)
    known = {folder_of(volume) for volume in volumes}
    yield from (f"folder {path.name} of a volume" for path in cluster.layout.volumes.iterdir() if path not in known)


# --- on the nodes ---


def _snapshots(cluster: SoakCluster, node: Node) -> str:
    return _ctr(cluster, node, "snapshots", "list")


def _folders_of_no_snapshot(cluster: SoakCluster, node: Node) -> Iterator[str]:
    """Folders that remain although containerd has collected its garbage."""
    if _surplus_folders(cluster, node) > 0:
        _collect_garbage(cluster, node)
    if (folders := _surplus_folders(cluster, node)) > 0:
        yield f"{folders} folders of no snapshot on {node.name}"


def _surplus_folders(cluster: SoakCluster, node: Node) -> int:
    known = len(_snapshots(cluster, node).splitlines()) - 1
    return len(list((cluster.layout.node(node).images / _SNAPSHOTS).iterdir())) - known


def _collect_garbage(cluster: SoakCluster, node: Node) -> None:
    """Make containerd collect garbage of an earlier kill, which it does after it has removed a snapshot or a lease."""
    _ctr(cluster, node, "snapshots", "prepare", _GARBAGE)
    with suppress(ClusterError):  # it may have been collected already
        _ctr(cluster, node, "snapshots", "remove", _GARBAGE)
    _ctr(cluster, node, "leases", "create", "--id", _GARBAGE)
    _ctr(cluster, node, "leases", "delete", "--sync", _GARBAGE)


def _containers(cluster: SoakCluster, node: Node) -> list[Container]:
    ids = _ctr(cluster, node, "containers", "list", "--quiet").split()
    return [container for id_ in ids if (container := _container(cluster, node, id_))]


def _container(cluster: SoakCluster, node: Node, id_: str) -> Container | None:
    """None if the container is gone since it was listed."""
    try:
        return Container.of(json.loads(_ctr(cluster, node, "containers", "info", id_)))
    except ClusterError as error:
        if "not found" not in str(error):
            raise
        return None


def _of_pods(cluster: SoakCluster) -> Iterator[tuple[str, str]]:
    """Traces of pods, each with the uid of its pod."""
    yield from (("control group", group.name.removeprefix("pod")) for group in processes.groups_of_pods())
    yield from (("mount", uid) for _, uid in ids_in(_mounts(cluster), _POD_UID))
    for node in NODES:
        state = cluster.layout.node(node).state
        yield from (("kubelet's folder", path.name) for path in (state / "kubelet" / "pods").iterdir())
        yield from (("folder of logs", path.name.rpartition("_")[2]) for path in (state / "pod-logs").iterdir())


def _of_containers(cluster: SoakCluster) -> Iterator[tuple[str, str]]:
    """Traces of containers, each with the id of its container."""
    yield from (("shim", shim.name) for shim in processes.shims())
    yield from (("mount", id_) for _, id_ in ids_in(_mounts(cluster), _CONTAINER_ID))
    for node in NODES:
        snapshots = ids_in(_snapshots(cluster, node), _CONTAINER_ID)
        yield from (("snapshot", id_) for line, id_ in snapshots if "Active" in line)
        for path in (cluster.layout.node(node).state / "addresses").glob("*/*.*.*.*"):
            with suppress(FileNotFoundError):
                yield f"address {path.name}", path.read_text().partition("\n")[0].strip()


def _network_namespaces() -> list[str]:
    return [path.name for path in Path(f"/proc/{machine.first_process()}/root/run/netns").glob("*")]


def _mounts(cluster: SoakCluster) -> str:
    """Mount points of the nodes, one per line. The cluster's list also has other mounts of this machine."""
    mounts = Path(f"/proc/{machine.first_process()}/mounts").read_text().splitlines()
    return "\n".join(at for _, at, *_ in map(str.split, mounts) if at.startswith(str(cluster.layout.state)))


def _files_of_pods(folder: Path) -> Iterable[Path]:
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            if path.lstat().st_uid == _USER_OF_PODS:
                yield path


def _size(file: Path) -> int:
    """0 if the file is gone."""
    with suppress(FileNotFoundError):
        return file.lstat().st_blocks * 512
    return 0


def _ctr(cluster: SoakCluster, node: Node, *words: str) -> str:
    socket = cluster.layout.node(node).containerd_socket
    return run(cluster.layout.binaries / "ctr", "--address", socket, "--namespace", "k8s.io", *words)
