"""Nodes and kubelets that KWOK simulates."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bench.harness.many_jobs import in_parallel
from rljob_cluster.control_plane import ControlPlane
from rljob_testing.operator import manifests
from rljob_testing.operator.api_client import ApiClient, Object
from rljob_testing.operator.go_modules import module_files

KWOK_MODULE = "sigs.k8s.io/kwok@v0.8.0"
KWOK_STAGES = "kustomize/stage/{}/*.yaml"
_LOOK_SECONDS = 5.0


@contextmanager
def kwok(plane: ControlPlane, *, heartbeats: bool = True) -> Iterator[None]:
    """KWOK simulates the kubelets of all nodes, with the stages of its own module.

    `heartbeats`: the Lease of each node is renewed every ten seconds, which is 500 writes a second for 5,000 nodes.
    """
    folders = ["node/fast", "pod/fast", *(["node/heartbeat-with-lease"] if heartbeats else [])]
    stages = [
        argument
        for folder in folders
        for file in module_files(KWOK_MODULE, KWOK_STAGES.format(folder))
        if file.name != "kustomization.yaml"
        for argument in ("--config", str(file))
    ]
    program = plane.kubectl.with_name("kwok")
    lease = [] if heartbeats else ["--node-lease-duration-seconds=0"]
    command = [str(program), "--kubeconfig", str(plane.kubeconfig), "--manage-all-nodes", *lease, *stages]
    with (plane.directory / "kwok.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def make_nodes(api: ApiClient, count: int) -> None:
    """Create nodes `node-0`, …; returns when all are ready."""
    in_parallel(lambda number: api.create("nodes", manifests.node(f"node-{number}", {"type": "kwok"})), range(count))
    while not all(is_ready(node) for node in api.list("nodes")):
        time.sleep(_LOOK_SECONDS)


def is_ready(node: Object) -> bool:
    conditions = node.get("status", {}).get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
