"""Shared by tests of jobs in pods: images on the nodes, the installed operator, and jobs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rljob_cluster.images import load
from rljob_cluster.layout import ClusterLayout
from rljob_testing.cluster.installed_operator import InstalledOperator
from rljob_testing.cluster.kubectl import Kubectl
from tests.e2e.image_container import build_images, missing
from tests.e2e.test_built_images import OPERATOR, TRAINER


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
def jobs(operator: InstalledOperator, namespace: Kubectl) -> Iterator[Kubectl]:
    """kubectl in a namespace of the test's own, with an operator that looks after it; its jobs go with the test."""
    yield namespace
    namespace("delete", "rljobs", "--all", "--wait=false")
