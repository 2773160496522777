"""A control plane and one real kubelet with containerd, from built programs only."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from bench.harness.gpu_cluster.namespaces import ADDRESS, CGROUP_ROOT
from rljob_cluster import cluster_programs, control_plane_programs, node_config
from rljob_cluster.api_client import ApiClient, admin_client
from rljob_cluster.binaries import CONTROL_PLANE, require_binaries
from rljob_cluster.child_process import ChildProcess
from rljob_cluster.cluster import give_gpus, has_service_account, is_ready
from rljob_cluster.commands import run
from rljob_cluster.control_plane_programs import write_credentials
from rljob_cluster.errors import ClusterError
from rljob_cluster.images import node_images, write_pause_archive
from rljob_cluster.layout import ClusterLayout, Node
from rljob_cluster.oci_archive import SmallImage, write_archive

PROGRAMS = (*CONTROL_PLANE, "kubelet", "containerd", "containerd-shim-runc-v2", "ctr", "pause")
NAMESPACE = "default"
NODE = Node("gpu-node", ADDRESS, pod_network="", gpus=1)
_START_SECONDS = 60.0


class OneNodeCluster:
    """Its programs end with this process. Pods must use the node's network; there is no other."""

    def __init__(self, binaries: Path, state: Path) -> None:
        """Raises ClusterError if a program is missing."""
        require_binaries(binaries, PROGRAMS)
        self.layout = ClusterLayout(state, binaries)
        self._children: list[ChildProcess] = []

    @property
    def api(self) -> ApiClient:
        """Once the control plane is there."""
        return admin_client(self.layout.control_plane)

    @property
    def kubectl(self) -> list[str]:
        """Command line of the administrator's kubectl."""
        program = str(self.layout.binaries / "kubectl")
        return [program, f"--kubeconfig={self.layout.kubeconfig}", f"--namespace={NAMESPACE}"]

    @property
    def pod_logs(self) -> Path:
        return self.layout.node(NODE).state / "pod-logs"

    def start_control_plane(self) -> None:
        """Return when the API server is ready. Raises ClusterError if it is not in time."""
        _write_files(self.layout)
        control_plane = self.layout.control_plane
        self._start("etcd", control_plane_programs.etcd(control_plane))
        self._start("kube-apiserver", control_plane_programs.api_server(control_plane))
        self.api.wait_ready(self.check_running)
        self._start("kube-controller-manager", control_plane_programs.controller_manager(control_plane))
        self._start("kube-scheduler", control_plane_programs.scheduler(control_plane))

    def start_node(self, image: SmallImage) -> None:
        """Return when pods of `image` can be created and the node has its GPU. Raises ClusterError."""
        self._start("containerd", cluster_programs.containerd(self.layout, NODE))
        self._wait_until("containerd answers", self.layout.node(NODE).containerd_socket.exists)
        archive = self.layout.state / "image.tar"
        write_archive(image, archive)
        for path in (write_pause_archive(self.layout), archive):
            node_images(self.layout, NODE).import_archive(path)
        self._start("kubelet", cluster_programs.kubelet(self.layout, NODE))
        self._wait_until("the node registers", partial(give_gpus, self.api, NODE))
        self._wait_until("the node is Ready", partial(is_ready, self.api, NODE))
        self._wait_until("pods can be created", partial(has_service_account, self.api))

    def install(self, crds: Path) -> None:
        """Apply the CRDs of a folder, and wait until they are served. Raises ClusterError."""
        run(*self.kubectl, "apply", "--server-side", "--request-timeout=30s", "-f", crds)
        self.api.wait_established()

    def apply(self, manifest: dict[str, Any]) -> None:
        """Raises ClusterError if the API server refuses the object."""
        apply = ("apply", "--server-side", "--request-timeout=30s", "-f", "-")
        run(*self.kubectl, *apply, input=json.dumps(manifest).encode())

    def check_running(self) -> None:
        """Raises ClusterError, with the end of its log, if a program has ended."""
        for child in self._children:
            child.check_running()

    def _start(self, name: str, command: list[str]) -> None:
        child = ChildProcess(command, self.layout.logs / f"{name}.log")
        child.start()
        self._children.append(child)

    def _wait_until(self, what: str, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + _START_SECONDS
        while not holds():
            self.check_running()
            if time.monotonic() > end:
                raise ClusterError(f"expected within {_START_SECONDS:.0f} s: {what}")
            time.sleep(0.1)


def _write_files(layout: ClusterLayout) -> None:
    """Certificates and the configuration of the node."""
    layout.logs.mkdir(parents=True)
    write_credentials(layout.control_plane)
    files = layout.node(NODE)
    files.cni_config.mkdir(parents=True)
    control_plane = layout.control_plane
    control_plane.authority.kubeconfig(
        control_plane.kubeconfig(NODE.name), control_plane.url, f"system:node:{NODE.name}", "system:nodes"
    )
    files.containerd_config.write_text(node_config.containerd_config(layout, NODE))
    # All pods share the node's network, so no plugin is ever run; but without one the node does not count as ready.
    plugin = {"cniVersion": "1.0.0", "name": NODE.name, "plugins": [{"type": "loopback"}]}
    (files.cni_config / "pods.conflist").write_text(json.dumps(plugin))
    kubelet = yaml.safe_load(node_config.kubelet_config(layout, NODE))
    files.kubelet_config.write_text(yaml.safe_dump(kubelet | {"cgroupRoot": CGROUP_ROOT}))
