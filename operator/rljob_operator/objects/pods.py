"""Controller and worker pods, before the user's template and before placement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rljob_api.exit_codes import ExitCode
from rljob_api.status import Role
from rljob_memory.allocator import NO_GPU
from rljob_operator import labels, names
from rljob_operator.objects.attempt import JobAttempt, Manifest, object_metadata, pod_labels
from rljob_operator.objects.pod_environment import (
    adapter_variables,
    env_from,
    job_entries,
    literal_entries,
    plan_variables,
    ray_entries,
    rendezvous_entries,
    with_user_entries,
)
from rljob_operator.objects.pod_layout import WorkerGroup
from rljob_operator.objects.pod_volumes import RUN_DIRECTORY, pod_volumes
from rljob_operator.objects.predicted_memory import memory_request
from rljob_operator.objects.supporting_objects import RAY_PORT, account_name, service_name

REQUESTS = {"cpu": "500m", "memory": "2Gi"}
"""Ray's head, its object store apart, and one process without torch."""


def build_controller_pod(attempt: JobAttempt) -> Manifest:
    """The controller pod, before the user's template and before placement."""
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
"""Memory request of a worker if the size of the model is not known, in GiB."""


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


# --- Parts of all pods ---


CONTAINER = "rljob"

RESTART_ALL_CONTAINERS = "RestartAllContainers"
"""Action of a restart rule: the pod stays on its node, and all its containers are restarted."""

_RESTART_IN_PLACE = {
    "action": RESTART_ALL_CONTAINERS,
    "exitCodes": {"operator": "In", "values": [int(ExitCode.RESTART_IN_PLACE)]},
}


def pod_frame(attempt: JobAttempt, name: str, role: Role, container: dict[str, Any]) -> dict[str, Any]:
    """The first pod of a role, with one container and no restart policy: the operator decides what follows its
    termination."""
    volumes, _ = pod_volumes(attempt, role)
    user = attempt.settings.run_as_user
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": attempt.settings.termination_grace_seconds,
        "hostname": name,
        "subdomain": service_name(attempt),
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup") if user else (), user),
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }
    if attempt.settings.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret} for secret in attempt.settings.image_pull_secrets]
    metadata = object_metadata(attempt, name, role) | {
        "labels": pod_labels(attempt, role),
        "annotations": {"kubectl.kubernetes.io/default-container": CONTAINER},
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def container_frame(
    attempt: JobAttempt,
    role: Role,
    environment: list[dict[str, Any]],
    resources: dict[str, Any],
    *,
    read_only_root: bool,
) -> dict[str, Any]:
    """The container `rljob` without its image and command."""
    _, mounts = pod_volumes(attempt, role)
    return {
        "name": CONTAINER,
        "env": with_user_entries(environment, attempt.spec),
        **env_from(attempt.spec),
        "resources": resources,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": read_only_root,
        },
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "volumeMounts": mounts,
    }


def own_trainer(attempt: JobAttempt, command: str) -> dict[str, Any]:
    """Image, command, readiness probe and restart rule of a container of RLJob's own trainer."""
    in_place = (
        {"restartPolicy": "Never", "restartPolicyRules": [_RESTART_IN_PLACE]} if attempt.restarts_in_place else {}
    )
    return {
        **in_place,
        "image": attempt.settings.trainer_image,
        "imagePullPolicy": attempt.settings.trainer_image_pull_policy,
        "command": ["rljob", command],
        "readinessProbe": {
            "exec": {"command": ["test", "-e", f"{RUN_DIRECTORY}/ready"]},
            "periodSeconds": 5,
            "timeoutSeconds": 5,
            "failureThreshold": 3,
        },
    }
