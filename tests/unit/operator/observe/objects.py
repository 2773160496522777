"""Objects as the API server gives them."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]

CREATED = "2026-01-02T03:04:05Z"
UID = "0b7f9f0e-5e2b-4a53-9a43-d6f1a8f6a001"


def job(name: str = "sums", version: int = 10, uid: str = UID, **fields: Any) -> Object:
    """An RLJob of namespace research; `fields`: status, spec, or what goes into metadata by its name there."""
    spec = {"model": {"uri": "random://qwen3"}, "task": {"name": "digits"}, "algorithm": {"steps": 60}}
    metadata = {
        "name": name,
        "namespace": "research",
        "uid": uid,
        "resourceVersion": str(version),
        "generation": 2,
        "creationTimestamp": CREATED,
        "managedFields": [{"manager": "kubectl"}],
    }
    top = {key: fields.pop(key) for key in ("spec", "status") if key in fields}
    return {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": metadata | fields, "spec": spec} | top


def pod(name: str = "sums-controller", version: int = 20, **fields: Any) -> Object:
    """The controller pod of the job; `fields`: status, spec, or what goes into metadata by its name there."""
    metadata = {
        "name": name,
        "namespace": "research",
        "uid": f"uid-of-{name}",
        "resourceVersion": str(version),
        "creationTimestamp": CREATED,
        "labels": {
            "app.kubernetes.io/managed-by": "rljob-operator",
            "rljob.dev/job-name": "sums",
            "rljob.dev/role": "controller",
            "rljob.dev/index": "0",
            "rljob.dev/attempt": "1",
        },
        "ownerReferences": [{"kind": "RLJob", "name": "sums", "uid": UID, "controller": True}],
    }
    top = {key: fields.pop(key) for key in ("spec", "status") if key in fields}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata | fields, "spec": {}, "status": {}} | top


def node(name: str = "cpu-node", version: int = 30, gpus: str | None = None, **fields: Any) -> Object:
    """A node that is ready; `fields`: spec, or what goes into metadata by its name there."""
    allocatable = {"cpu": "8"} | ({"nvidia.com/gpu": gpus} if gpus is not None else {})
    status = {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": "True"}]}
    top = {key: fields.pop(key) for key in ("spec", "status") if key in fields}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "resourceVersion": str(version)} | fields,
        "spec": {},
        "status": status,
    } | top


def step_report(version: int = 40, owner: str = UID, **status: Any) -> Object:
    """The StepReport of the job; `status`: its fields."""
    metadata = {
        "name": "sums",
        "namespace": "research",
        "uid": "r",
        "resourceVersion": str(version),
        "ownerReferences": [{"kind": "RLJob", "name": "sums", "uid": owner, "controller": True}],
    }
    return {"apiVersion": "rljob.dev/v1alpha1", "kind": "StepReport", "metadata": metadata, "status": status}
