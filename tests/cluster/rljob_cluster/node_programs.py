"""Programs outside the control plane: their configuration files and command lines, as pure functions of the layout."""

from __future__ import annotations

import json
from typing import Any

import yaml

from rljob_cluster.layout import (
    CGROUP,
    CONTROL_PLANE_ADDRESS,
    DNS_DOMAIN,
    DNS_SERVICE_ADDRESS,
    NODES,
    POD_NETWORK,
    ClusterLayout,
    Node,
)

# Configuration files of a node, as pure functions of the layout.

PAUSE_IMAGE = "localhost/rljob-cluster/pause:1"

# Labels that NVIDIA's GPU feature discovery sets on a node with eight H200.
GPU_LABELS = {
    "feature.node.kubernetes.io/pci-10de.present": "true",
    "nvidia.com/cuda.driver.major": "580",
    "nvidia.com/gpu.compute.major": "9",
    "nvidia.com/gpu.compute.minor": "0",
    "nvidia.com/gpu.count": "8",
    "nvidia.com/gpu.family": "hopper",
    "nvidia.com/gpu.memory": "143771",
    "nvidia.com/gpu.present": "true",
    "nvidia.com/gpu.product": "NVIDIA-H200",
}


def containerd_config(layout: ClusterLayout, node: Node) -> str:
    """TOML for containerd 2: overlayfs, runc, cgroups without systemd, a sandbox image that is never pulled."""
    files = layout.node(node)
    return f"""\
version = 3
root = "{files.images}"
state = "{files.state}/containerd"
oom_score = 0
disabled_plugins = [
  "io.containerd.nri.v1.nri",
  "io.containerd.snapshotter.v1.blockfile",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.erofs",
  "io.containerd.snapshotter.v1.zfs",
]

[grpc]
address = "{files.containerd_socket}"

[ttrpc]
address = "{files.containerd_socket}.ttrpc"

[plugins."io.containerd.cri.v1.images"]
snapshotter = "overlayfs"
discard_unpacked_layers = true

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{PAUSE_IMAGE}"

[plugins."io.containerd.cri.v1.runtime"]
# A machine may forbid lowering a process's OOM score.
restrict_oom_score_adj = true

[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["/usr/lib/cni", "/opt/cni/bin"]
conf_dir = "{files.cni_config}"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
runtime_path = "{layout.binaries}/containerd-shim-runc-v2"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
SystemdCgroup = false
"""


def cni_config(layout: ClusterLayout, node: Node) -> str:
    """CNI configuration with routed point-to-point links: Services work without bridge filtering in the kernel."""
    addresses = {
        "type": "host-local",
        "dataDir": f"{layout.node(node).state}/addresses",
        "ranges": [[{"subnet": node.pod_network}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    plugins = [{"type": "ptp", "ipam": addresses}, {"type": "portmap", "capabilities": {"portMappings": True}}]
    return json.dumps({"cniVersion": "1.0.0", "name": node.name, "plugins": plugins}, indent=2)


def kubelet_config(layout: ClusterLayout, node: Node) -> str:
    files = layout.node(node)
    document: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node.address,
        "healthzBindAddress": node.address,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(layout.control_plane.authority.pair.certificate)},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{files.containerd_socket}",
        "clusterDNS": [DNS_SERVICE_ADDRESS],
        "clusterDomain": DNS_DOMAIN,
        # The cluster has no Internet access: other names than its own fail at once.
        "resolvConf": "",
        "podLogsDir": str(files.state / "pod-logs"),
        "volumePluginDir": str(files.state / "volume-plugins"),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{CGROUP}/{node.name}",
        "failCgroupV1": False,
        "enforceNodeAllocatable": [],
        "oomScoreAdj": 0,
        "failSwapOn": False,
        # The disk is shared with the machine: its other files must not lead to evicted pods or removed images.
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
    }
    return yaml.safe_dump(document, sort_keys=False)


def node_labels(node: Node) -> dict[str, str]:
    return GPU_LABELS if node.gpus else {}


# Command lines of the programs outside the control plane, as pure functions of the layout.

DNS_USER = "system:coredns"
VOLUME_PROVISIONER_USER = "system:volume-provisioner"
PROXY_USER = "system:kube-proxy"
PROXY_HEALTH_PORT = 10256
DNS_HEALTH_PORT = 8181


def containerd(layout: ClusterLayout, node: Node) -> list[str]:
    return [str(layout.binaries / "containerd"), f"--config={layout.node(node).containerd_config}"]


def kubelet(layout: ClusterLayout, node: Node) -> list[str]:
    files = layout.node(node)
    labels = ",".join(f"{name}={value}" for name, value in node_labels(node).items())
    return [
        str(layout.binaries / "kubelet"),
        f"--config={files.kubelet_config}",
        f"--kubeconfig={layout.control_plane.kubeconfig(node.name)}",
        f"--root-dir={files.state}/kubelet",
        f"--cert-dir={files.state}/kubelet-certificates",
        f"--hostname-override={node.name}",
        f"--node-ip={node.address}",
        f"--node-labels={labels}",
    ]


def kube_proxy(layout: ClusterLayout) -> list[str]:
    """One process for all nodes, which share the network of the machine."""
    return [
        str(layout.binaries / "kube-proxy"),
        f"--kubeconfig={layout.control_plane.kubeconfig('kube-proxy')}",
        "--proxy-mode=iptables",
        f"--cluster-cidr={POD_NETWORK}",
        f"--hostname-override={NODES[0].name}",
        f"--bind-address={CONTROL_PLANE_ADDRESS}",
        f"--healthz-bind-address={CONTROL_PLANE_ADDRESS}:{PROXY_HEALTH_PORT}",
        "--oom-score-adj=0",
        # These can be set only in the machine's own network namespace.
        "--conntrack-max-per-core=0",
        "--conntrack-tcp-timeout-established=0",
        "--conntrack-tcp-timeout-close-wait=0",
    ]


def coredns(layout: ClusterLayout) -> list[str]:
    return [str(layout.binaries / "coredns"), "-conf", str(layout.corefile)]


def corefile(layout: ClusterLayout) -> str:
    return f"""\
. {{
  bind {CONTROL_PLANE_ADDRESS}
  errors
  ready {CONTROL_PLANE_ADDRESS}:{DNS_HEALTH_PORT}
  kubernetes {DNS_DOMAIN} in-addr.arpa {{
    kubeconfig {layout.control_plane.kubeconfig("coredns")}
  }}
  cache 5
}}
"""


def volume_provisioner(layout: ClusterLayout) -> list[str]:
    return [
        str(layout.binaries / "volume-provisioner"),
        f"--kubeconfig={layout.control_plane.kubeconfig('volume-provisioner')}",
        f"--root={layout.volumes}",
    ]


def kwok(layout: ClusterLayout) -> list[str]:
    return [
        str(layout.binaries / "kwok"),
        f"--kubeconfig={layout.kubeconfig}",
        f"--config={layout.kwok_config}",
        "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
    ]
