"""Shared by the end-to-end tests: a real cluster on this machine, images, the installed operator, and namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from rich.console import Console

from rljob_cluster import cluster as cluster_module
from rljob_cluster.cluster import missing_packages
from rljob_cluster.commands import ProgressLines
from rljob_cluster.image_files import SmallImage, write_archive
from rljob_cluster.images import load, load_archive
from rljob_cluster.layout import ClusterLayout
from rljob_testing.cluster import AdminKubectl, InstalledOperator
from tests.e2e.image_container import build_images, missing
from tests.e2e.test_built_images import OPERATOR, TRAINER

BUSYBOX = "localhost/rljob-cluster/busybox:1"


@pytest.fixture(scope="session")
def cluster() -> ClusterLayout:
    """The cluster, up. It stays up after the tests: `make cluster-down` ends it."""
    if os.geteuid() != 0:
        pytest.skip("a cluster needs root")
    if missing := missing_packages():
        pytest.skip(f"a cluster needs {', '.join(missing)}")
    layout = ClusterLayout.default()
    cluster_module.up(layout, ProgressLines(Console(stderr=True)))
    return layout


@pytest.fixture(scope="session")
def kubectl(cluster: ClusterLayout) -> AdminKubectl:
    return AdminKubectl(cluster.binaries / "kubectl", cluster.kubeconfig)


@pytest.fixture
def namespace(kubectl: AdminKubectl) -> Iterator[AdminKubectl]:
    """kubectl in a namespace of the test's own that enforces the restricted Pod Security Standard."""
    name = f"test-{uuid4().hex[:8]}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    inside = AdminKubectl(kubectl.program, kubectl.kubeconfig, name)
    inside.wait("serviceaccount", "default", bool)  # without it, pods are refused
    yield inside
    kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def busybox(cluster: ClusterLayout, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of a small image with a shell, on every node."""
    program = shutil.which("busybox")
    if program is None:
        pytest.skip("the test image is made of busybox-static")
    applets = subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout.split()
    links = {f"bin/{applet}": "busybox" for applet in applets if applet != "busybox"}
    archive = tmp_path_factory.mktemp("images") / "busybox.tar"
    write_archive(SmallImage(BUSYBOX, {"bin/busybox": Path(program).read_bytes()}, links, ("/bin/sh", "-c")), archive)
    load_archive(cluster, archive)
    return BUSYBOX


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests that end the cluster come before those that keep something in it."""
    items.sort(key=lambda item: "test_cluster_lifecycle" not in item.nodeid)


@pytest.fixture(scope="session")
def operator(cluster: ClusterLayout) -> InstalledOperator:
    """The operator, installed by Helm, with the images of this checkout on both nodes."""
    if lacking := missing():
        pytest.skip(f"images: {lacking}")
    build_images("operator", "trainer")
    for image in (OPERATOR, TRAINER):
        load(cluster, image)
    installed = InstalledOperator(cluster)
    installed.install()
    return installed


@pytest.fixture
def jobs(operator: InstalledOperator, namespace: AdminKubectl) -> Iterator[AdminKubectl]:
    """kubectl in a namespace of the test's own, with an operator that looks after it; its jobs go with the test."""
    yield namespace
    namespace("delete", "rljobs", "--all", "--wait=false")
