"""Configuration files of nodes, and their addresses."""

from __future__ import annotations

import ipaddress
import json
import tomllib
from pathlib import Path

import pytest
import yaml

from rljob_cluster.cluster import MANIFESTS
from rljob_cluster.control_plane_programs import KUBERNETES_SERVICE_IP, SERVICE_RANGE
from rljob_cluster.layout import (
    CONTROL_PLANE_ADDRESS,
    DNS_SERVICE_ADDRESS,
    HOST_ADDRESS,
    NODE_NETWORK,
    NODES,
    POD_NETWORK,
    ClusterLayout,
    Node,
)
from rljob_cluster.node_config import cni_config, containerd_config, kubelet_config, node_labels

LAYOUT = ClusterLayout(Path("/cache/cluster"), Path("/cache/bin"))
BOTH = pytest.mark.parametrize("node", NODES, ids=lambda node: node.name)


@BOTH
def test_containerd_keeps_images_outside_the_state_of_the_cluster(node: Node) -> None:
    config = tomllib.loads(containerd_config(LAYOUT, node))
    assert Path(config["root"]).is_relative_to(LAYOUT.images)
    assert Path(config["state"]).is_relative_to(LAYOUT.state)


@BOTH
def test_the_kubelet_uses_its_own_containerd(node: Node) -> None:
    kubelet = yaml.safe_load(kubelet_config(LAYOUT, node))
    containerd = tomllib.loads(containerd_config(LAYOUT, node))
    assert kubelet["containerRuntimeEndpoint"] == f"unix://{containerd['grpc']['address']}"


@BOTH
def test_pods_get_addresses_of_their_node(node: Node) -> None:
    ranges = json.loads(cni_config(LAYOUT, node))["plugins"][0]["ipam"]["ranges"]
    assert ranges == [[{"subnet": node.pod_network}]]
    assert ipaddress.ip_network(node.pod_network).subnet_of(ipaddress.ip_network(POD_NETWORK))  # type: ignore[arg-type]


def test_nothing_is_shared_between_nodes() -> None:
    for values in zip(*((node.name, node.address, node.pod_network) for node in NODES), strict=True):
        assert len(set(values)) == len(NODES)


def test_every_address_is_in_its_network() -> None:
    for address in (HOST_ADDRESS, CONTROL_PLANE_ADDRESS, *(node.address for node in NODES)):
        assert ipaddress.ip_address(address) in ipaddress.ip_network(NODE_NETWORK)
    for address in (KUBERNETES_SERVICE_IP, DNS_SERVICE_ADDRESS):
        assert ipaddress.ip_address(address) in ipaddress.ip_network(SERVICE_RANGE)


def test_the_dns_service_has_the_address_that_pods_ask() -> None:
    objects = list(yaml.safe_load_all((MANIFESTS / "addons.yaml").read_text()))
    service = next(found for found in objects if found["kind"] == "Service")
    endpoints = next(found for found in objects if found["kind"] == "EndpointSlice")
    assert service["spec"]["clusterIP"] == DNS_SERVICE_ADDRESS
    assert endpoints["endpoints"] == [{"addresses": [CONTROL_PLANE_ADDRESS]}]


def test_only_nodes_with_gpus_are_labelled_as_such() -> None:
    assert {node.name: node_labels(node).get("nvidia.com/gpu.count") for node in NODES} == {
        "cpu-node": None,
        "gpu-node": "8",
    }
