"""Manifests of jobs and of related objects."""

from __future__ import annotations

from typing import Any

from rljob_api.metadata import API_VERSION

Object = dict[str, Any]


def job(name: str = "job", **spec: Any) -> Object:
    """A small valid RLJob. `spec` replaces whole fields of its spec, except `algorithm`, whose fields are added."""
    return {
        "apiVersion": API_VERSION,
        "kind": "RLJob",
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": "random://qwen3"},
            "task": {"name": "digits"},
            "algorithm": {"steps": 10} | spec.pop("algorithm", {}),
            "checkpoint": {"volume": {"persistentVolumeClaim": {"claimName": "checkpoints"}}},
            **spec,
        },
    }


def namespace(name: str) -> Object:
    """A namespace that refuses pods that are not `restricted`."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def node(name: str, labels: dict[str, str]) -> Object:
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}


def node_status(gpus: int) -> Object:
    """A ready node with ample resources. 0 GPUs: the resource is absent, or removed by a merge patch."""
    resources = {"cpu": "64", "memory": "512Gi", "pods": "500", "nvidia.com/gpu": str(gpus) if gpus else None}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "kubelet is posting ready status"}
    return {"capacity": resources, "allocatable": resources, "conditions": [ready]}


def step_report(name: str, attempt: int, step: int, **fields: Any) -> Object:
    """The StepReport of a run on one GPU; `fields` replace or add fields of its status."""
    status = {
        "attempt": attempt,
        "planGeneration": 1,
        "plan": PLAN,
        "step": step,
        "phase": "rollout",
        "reward": 0.5,
        **fields,
    }
    return {"apiVersion": API_VERSION, "kind": "StepReport", "metadata": {"name": name}, "status": status}


PLAN: Object = {
    "generation": 1,
    "emptyCache": True,
    "expandableSegments": True,
    "rolloutSleep": "Level1",
    "kvCache": 1 << 30,
    "microBatchTokens": 4096,
    "logprobChunkTokens": 1024,
    "activationCheckpointing": False,
    "optimizerOffload": 0,
    "syncBucketSize": 1 << 28,
}
"""The first memory plan of the trainer."""
