"""Controller and worker pods, before the user's template and before placement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rljob_memory.allocator import NO_GPU
from rljob_operator import labels, names
from rljob_operator.objects.accounts import account_name
from rljob_operator.objects.attempt import JobAttempt
from rljob_operator.objects.metadata import Manifest
from rljob_operator.objects.pod_environment import (
    adapter_variables,
    job_entries,
    literal_entries,
    plan_variables,
    ray_entries,
    rendezvous_entries,
)
from rljob_operator.objects.pod_layout import WorkerGroup
from rljob_operator.objects.pod_parts import container_frame, own_trainer, pod_frame
from rljob_operator.objects.predicted_memory import memory_request
from rljob_operator.objects.supporting_objects import RAY_PORT

REQUESTS = {"cpu": "500m", "memory": "2Gi"}
"""Ray's head, its object store apart, and one process without torch."""


def build_controller_pod(attempt: JobAttempt) -> Manifest:
    """Before the user's template, and before placement."""
    environment = [
        *job_entries(attempt, "controller"),
        {"name": "RLJOB_STEP_REPORT", "value": names.step_report_name(attempt.name)},
        *ray_entries(attempt),
        *literal_entries(NO_GPU),
    ]
    container = {
        **container_frame(attempt, "controller", environment, {"requests": dict(REQUESTS)}, read_only_root=True),
        **own_trainer(attempt, "controller"),
        "ports": [{"name": "ray", "containerPort": RAY_PORT, "protocol": "TCP"}],
    }
    pod = pod_frame(attempt, names.controller_pod_name(attempt.name), "controller", container)
    pod["spec"]["serviceAccountName"] = account_name(attempt)
    pod["spec"]["automountServiceAccountToken"] = True
    return pod


CPUS_PER_GPU = 1
MEMORY_GIB_PER_GPU = 4
"""If the size of the model is not known."""


def build_worker_pod(attempt: JobAttempt, group: WorkerGroup, allocator: Mapping[str, str]) -> Manifest:
    """The first pod of the group, before the user's template, and before placement. `allocator`: the environment of the
    role's allocator."""
    build_container = _own_container if attempt.own_trainer else _other_container
    container = build_container(attempt, group, allocator)
    return pod_frame(attempt, names.worker_pod_name(attempt.name, group.role, 0), group.role, container)


def at_index(pod: Manifest, index: int, name: str) -> Manifest:
    """The pod `name` with another index of the same role. It shares with `pod` all that does not depend on the index,
    so a job of a thousand pods takes the memory of one template."""
    metadata = pod["metadata"]
    return {
        **pod,
        "metadata": {**metadata, "name": name, "labels": {**metadata["labels"], labels.INDEX: str(index)}},
        "spec": {**pod["spec"], "hostname": name},
    }


def _own_container(attempt: JobAttempt, group: WorkerGroup, allocator: Mapping[str, str]) -> dict[str, Any]:
    environment = [
        *job_entries(attempt, group.role),
        *ray_entries(attempt),
        *_gpu_entries(group, allocator),
    ]
    return {
        **container_frame(attempt, group.role, environment, _resources(attempt, group), read_only_root=True),
        **own_trainer(attempt, "worker"),
    }


def _other_container(attempt: JobAttempt, group: WorkerGroup, allocator: Mapping[str, str]) -> dict[str, Any]:
    """The image of another trainer, unchanged; its root file system stays writable."""
    trainer = attempt.spec.trainer
    assert trainer is not None
    environment = [
        *job_entries(attempt, group.role),
        *rendezvous_entries(attempt, group),
        *literal_entries(plan_variables(attempt.plan, trainer.supported_settings)),
        *literal_entries(adapter_variables(attempt)),
        *_gpu_entries(group, allocator),
    ]
    container = container_frame(attempt, group.role, environment, _resources(attempt, group), read_only_root=False)
    container["image"] = trainer.image
    if trainer.command:
        container["command"] = list(trainer.command)
    if trainer.args:
        container["args"] = list(trainer.args)
    return container


def _gpu_entries(group: WorkerGroup, allocator: Mapping[str, str]) -> list[dict[str, Any]]:
    """Variables of the allocator; GPUs of the node are hidden from a container without GPUs."""
    return literal_entries(dict(allocator) if group.gpus else {**allocator, **NO_GPU})


def _resources(attempt: JobAttempt, group: WorkerGroup) -> dict[str, Any]:
    """Requests; the memory limit follows from the template (`predicted_memory`)."""
    ranks = max(group.gpus, 1)
    memory = memory_request(attempt.spec, group) or f"{MEMORY_GIB_PER_GPU * ranks}Gi"
    requests = {"cpu": str(CPUS_PER_GPU * ranks), "memory": memory}
    if not group.gpus:
        return {"requests": requests}
    gpus = {attempt.gpu_resource: str(group.gpus)}
    return {"requests": {**requests, **gpus}, "limits": gpus}
