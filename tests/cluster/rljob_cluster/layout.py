"""Paths and addresses of a cluster. Nothing here changes the machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rljob_cluster.binaries import binary_directory, cache_directory
from rljob_cluster.control_plane_programs import ControlPlaneLayout

NODE_NETWORK = "10.200.0.0/24"
HOST_ADDRESS = "10.200.0.254"
"""Address of this machine on the network of the nodes."""
CONTROL_PLANE_ADDRESS = "10.200.0.1"
POD_NETWORK = "10.244.0.0/16"
DNS_SERVICE_ADDRESS = "10.96.0.10"
DNS_DOMAIN = "cluster.local"
CGROUP = "rljob-cluster"


@dataclass(frozen=True, slots=True)
class Node:
    """A node: a kubelet and its containerd."""

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
    """Files of one node."""

    state: Path
    """Folder that is removed with the cluster."""
    images: Path
    """Folder of the image store, which is kept for the next cluster."""

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
    """Files of one cluster."""

    root: Path
    """Folder of `state`, which is removed with the cluster, and `images`, which is kept for the next cluster."""
    binaries: Path
    """Folder of the programs."""

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
        """Lock file of the process that starts or stops the cluster."""
        return self.root / "lock"

    @property
    def volumes(self) -> Path:
        return self.state / "volumes"

    @property
    def corefile(self) -> Path:
        return self.state / "Corefile"

    @property
    def kwok_config(self) -> Path:
        """Configuration of KWOK, which runs if this file exists."""
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
