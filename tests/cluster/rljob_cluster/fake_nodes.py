"""Nodes without a machine, for tests of scale: KWOK simulates their kubelets. A taint keeps other pods away."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from rljob_cluster.binaries import KWOK, SOURCES, build
from rljob_cluster.commands import Progress, run
from rljob_cluster.layout import ClusterLayout
from rljob_cluster.node_config import GPU_LABELS
from rljob_cluster.status import GPU_RESOURCE

TAINT = "kwok.x-k8s.io/node"
# A node becomes and stays Ready; a pod becomes ready, completes and is deleted.
STAGES = ("node/fast", "node/heartbeat-with-lease", "pod/fast")


def add(layout: ClusterLayout, count: int, progress: Progress) -> None:
    """Ensure that at least `count` fake nodes exist, every second one with eight GPUs."""
    build([KWOK], layout.binaries, progress)
    with progress.step(f"adding {count} fake nodes"):
        if not layout.kwok_config.exists():
            layout.kwok_config.write_text(stages())
        manifest = yaml.safe_dump_all([fake_node(position) for position in range(count)])
        kubectl = (layout.binaries / "kubectl", "--kubeconfig", layout.kubeconfig)
        run(*kubectl, "apply", "--server-side", "-f", "-", input=manifest.encode())


def fake_node(position: int) -> dict[str, Any]:
    name = f"fake-{position:03}"
    gpus = 8 * (position % 2)
    resources = {"cpu": "128", "memory": "1Ti", "pods": "1000"} | ({GPU_RESOURCE: str(gpus)} if gpus else {})
    labels = {"kubernetes.io/hostname": name, "type": "kwok"} | (GPU_LABELS if gpus else {})
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels, "annotations": {TAINT: "fake"}},
        "spec": {"taints": [{"key": TAINT, "value": "fake", "effect": "NoSchedule"}]},
        "status": {"capacity": resources, "allocatable": resources},
    }


def stages() -> str:
    """Stages from the Go module of KWOK."""
    downloaded = run("go", "-C", SOURCES / KWOK.name, "mod", "download", "-json", "sigs.k8s.io/kwok")
    folder = Path(json.loads(downloaded)["Dir"]) / "kustomize" / "stage"
    files = [file for stage in STAGES for file in sorted((folder / stage).glob("*.yaml"))]
    return "---\n".join(file.read_text() for file in files if file.name != "kustomization.yaml")
