"""Command lines of the programs outside the control plane, as pure functions of the layout."""

from __future__ import annotations

from rljob_cluster.layout import CONTROL_PLANE_ADDRESS, DNS_DOMAIN, NODES, POD_NETWORK, ClusterLayout, Node
from rljob_cluster.node_config import node_labels

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
