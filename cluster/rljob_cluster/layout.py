"""Where a cluster's files lie, and its fixed addresses. Nothing here touches the machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rljob_cluster.binaries import binary_directory, cache_directory
from rljob_cluster.control_plane_programs import ControlPlaneLayout

NODE_NETWORK = "10.200.0.0/24"
HOST_ADDRESS = "10.200.0.254"
"""This machine, as the cluster sees it."""
CONTROL_PLANE_ADDRESS = "10.200.0.1"
POD_NETWORK = "10.244.0.0/16"
DNS_SERVICE_ADDRESS = "10.96.0.10"
DNS_DOMAIN = "cluster.local"
CGROUP = "rljob-cluster"


@dataclass(frozen=True, slots=True)
class Node:
    """One kubelet with its containerd."""

    name: str
    address: str
    pod_network: str
    gpus: int


NODES = (
    Node("cpu-node", "10.200.0.11", "10.244.1.0/24", gpus=0),
    Node("gpu-node", "10.200.0.12", "10.244.2.0/24", gpus=8),
)


@dataclass(frozen=True, slots=True)
class NodeFiles:
    """What one node keeps: `state` lives as long as the cluster, `images` outlives it."""

    state: Path
    images: Path

    @property
    def containerd_socket(self) -> Path:
        return self.state / "containerd.sock"

    @property
    def containerd_config(self) -> Path:
        return self.state / "containerd.toml"

    @property
    def cni_config(self) -> Path:
        return self.state / "cni"

    @property
    def kubelet_config(self) -> Path:
        return self.state / "kubelet.yaml"


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """The folders of one cluster: `root`/state goes with it, `root`/images stays for the next one."""

    root: Path
    binaries: Path

    @classmethod
    def default(cls) -> ClusterLayout:
        return cls(cache_directory(), binary_directory())

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def images(self) -> Path:
        return self.root / "images"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def kubeconfig(self) -> Path:
        return self.state / "kubeconfig"

    @property
    def lock(self) -> Path:
        """Held by whoever starts or ends the cluster."""
        return self.root / "lock"

    @property
    def volumes(self) -> Path:
        return self.state / "volumes"

    @property
    def corefile(self) -> Path:
        return self.state / "Corefile"

    @property
    def kwok_config(self) -> Path:
        """Its being there asks for KWOK."""
        return self.state / "kwok.yaml"

    @property
    def control_plane(self) -> ControlPlaneLayout:
        return ControlPlaneLayout(
            binaries=self.binaries,
            directory=self.state,
            address=CONTROL_PLANE_ADDRESS,
            api_port=6443,
            controller_manager_port=10257,
            scheduler_port=10259,
        )

    def node(self, node: Node) -> NodeFiles:
        return NodeFiles(self.state / "nodes" / node.name, self.images / node.name)
