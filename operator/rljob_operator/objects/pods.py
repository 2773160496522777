"""Controller and worker pods, with the environment of their container, before the user's template and placement."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from pydantic.alias_generators import to_snake

from rljob_api.exit_codes import ExitCode
from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_api.status import Role
from rljob_api.topology import WorkerPods
from rljob_memory.allocator import NO_GPU
from rljob_memory.next_plan import adapter_changes
from rljob_memory.plan_settings import name_of
from rljob_operator import labels, names
from rljob_operator.objects.attempt import CONTAINER, JobAttempt, Manifest, object_metadata, pod_labels
from rljob_operator.objects.pod_layout import worker_request
from rljob_operator.objects.pod_volumes import RUN_DIRECTORY, mounted_volumes
from rljob_operator.objects.supporting_objects import (
    METRICS_PORT,
    RAY_PORT,
    RENDEZVOUS_PORT,
    TOKEN_KEY,
    account_name,
    first_pod_host,
    service_name,
)

Variables = list[dict[str, Any]]
"""The field `env` of a container."""

_CONTROLLER_REQUESTS = {"cpu": "500m", "memory": "2Gi"}
"""Ray's head without its object store, and one process without torch."""
_CPUS_PER_GPU = 1
"""CPU request of a worker for each of its GPUs; at least one."""

RESTART_ALL_CONTAINERS = "RestartAllContainers"
"""Action of a restart rule: the pod stays on its node, and all its containers are restarted."""
_RESTART_IN_PLACE = {
    "action": RESTART_ALL_CONTAINERS,
    "exitCodes": {"operator": "In", "values": [int(ExitCode.RESTART_IN_PLACE)]},
}


def build_controller_pod(attempt: JobAttempt) -> Manifest:
    """Build the controller pod, before the user's template and before placement."""
    variables = [
        *_job_variables(attempt, "controller"),
        {"name": "RLJOB_STEP_REPORT", "value": attempt.name},
        *_ray_variables(attempt),
        *_literals(NO_GPU),
    ]
    ports = [{"name": "ray", "containerPort": RAY_PORT, "protocol": "TCP"}]
    if attempt.serves_metrics:
        ports.append({"name": "metrics", "containerPort": METRICS_PORT, "protocol": "TCP"})
        digest = attempt.settings.job_metrics_token_sha256
        variables += _literals({"RLJOB_METRICS_PORT": str(METRICS_PORT), "RLJOB_METRICS_TOKEN_SHA256": digest})
    container = {
        **_container(attempt, "controller", variables, {"requests": dict(_CONTROLLER_REQUESTS)}),
        **_trainer_fields(attempt, "controller"),
        "ports": ports,
    }
    pod = _pod(attempt, names.controller_pod_name(attempt.name), "controller", container)
    pod["spec"]["serviceAccountName"] = account_name(attempt)
    pod["spec"]["automountServiceAccountToken"] = True
    return pod


def build_worker_pod(attempt: JobAttempt, group: WorkerPods, allocator: Mapping[str, str]) -> Manifest:
    """Build the first pod of the group, before the user's template and before placement. `allocator`: the variables of
    the role's allocator."""
    trainer = attempt.spec.trainer
    variables = _job_variables(attempt, group.role)
    if trainer is None:
        variables += _ray_variables(attempt)
        fields = _trainer_fields(attempt, "worker")
    else:
        variables += _rendezvous_variables(attempt, group)
        variables += _literals(plan_variables(attempt.plan, trainer.supported_settings) | _adapter_variables(attempt))
        fields = {"image": trainer.image, "command": list(trainer.command or ()), "args": list(trainer.args or ())}
        fields = {name: value for name, value in fields.items() if value}
    # GPUs of the node are hidden from a container without GPUs.
    variables += _literals(allocator if group.gpus else {**allocator, **NO_GPU})
    container = _container(attempt, group.role, variables, _worker_resources(attempt, group))
    return _pod(attempt, names.worker_pod_name(attempt.name, group.role, 0), group.role, container | fields)


def at_index(pod: Manifest, index: int, name: str) -> Manifest:
    """Return the pod `name` with another index of the same role. It shares with `pod` all that does not depend on the
    index, so a job of a thousand pods takes the memory of one template."""
    metadata = pod["metadata"]
    return {
        **pod,
        "metadata": {**metadata, "name": name, "labels": {**metadata["labels"], labels.INDEX: str(index)}},
        "spec": {**pod["spec"], "hostname": name},
    }


def _worker_resources(attempt: JobAttempt, group: WorkerPods) -> dict[str, Any]:
    """Return the requests, and the limit of GPUs. The memory limit depends on the template."""
    ranks = max(group.gpus, 1)
    memory = worker_request(attempt.prediction, attempt.spec, group.role)
    requests = {"cpu": str(_CPUS_PER_GPU * ranks), "memory": memory}
    if not group.gpus:
        return {"requests": requests}
    gpus = {attempt.gpu_resource: str(group.gpus)}
    return {"requests": {**requests, **gpus}, "limits": gpus}


def _pod(attempt: JobAttempt, name: str, role: Role, container: dict[str, Any]) -> dict[str, Any]:
    """Build the first pod of a role. Nothing restarts it: the operator decides what follows its termination."""
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
        "volumes": [mounted.volume for mounted in mounted_volumes(attempt, role)],
    }
    if attempt.settings.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret} for secret in attempt.settings.image_pull_secrets]
    metadata = object_metadata(attempt, name, role) | {
        "labels": pod_labels(attempt, role),
        "annotations": {"kubectl.kubernetes.io/default-container": CONTAINER},
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _container(attempt: JobAttempt, role: Role, variables: Variables, resources: dict[str, Any]) -> dict[str, Any]:
    """Build the container `rljob` without its image and command. The root file system of another trainer's image stays
    writable."""
    return {
        "name": CONTAINER,
        **_with_user_variables(variables, attempt.spec),
        "resources": resources,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": attempt.own_trainer,
        },
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "volumeMounts": [mounted.mount for mounted in mounted_volumes(attempt, role)],
    }


def _trainer_fields(attempt: JobAttempt, command: str) -> dict[str, Any]:
    """Return image, command, readiness probe and restart rule of a container of RLJob's own trainer."""
    rules = {"restartPolicy": "Never", "restartPolicyRules": [_RESTART_IN_PLACE]} if attempt.restarts_in_place else {}
    return {
        **rules,
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


# --- Environment ---


def _literals(variables: Mapping[str, str]) -> Variables:
    return [{"name": name, "value": value} for name, value in variables.items()]


def _from_label(variable: str, label: str) -> dict[str, Any]:
    """Refer to a label instead of its value: the pods of a role, and those of two attempts, have the same spec."""
    return _from_pod(variable, f"metadata.labels['{label}']")


def _from_pod(variable: str, field: str) -> dict[str, Any]:
    return {"name": variable, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": field}}}


def _job_variables(attempt: JobAttempt, role: Role) -> Variables:
    """Return the variables of every pod, the same for all pods of a role and in all attempts. `RLJOB_ATTEMPT` is the
    attempt that the pod was created for."""
    variables = {
        "RLJOB_NAME": attempt.name,
        "RLJOB_NAMESPACE": attempt.namespace,
        "RLJOB_UID": attempt.uid,
        "RLJOB_ROLE": role,
        "RLJOB_WORKERS": str(attempt.layout.worker_count),
    }
    for volume in mounted_volumes(attempt, role):
        variables |= volume.variables
    return [
        *_literals(variables),
        _from_label("RLJOB_INDEX", labels.INDEX),
        _from_label("RLJOB_ATTEMPT", labels.ATTEMPT),
        _from_pod("POD_IP", "status.podIP"),
        _from_pod("NODE_NAME", "spec.nodeName"),
    ]


def _ray_variables(attempt: JobAttempt) -> Variables:
    token = {"secretKeyRef": {"name": names.ray_token_secret_name(attempt.name, attempt.uid), "key": TOKEN_KEY}}
    return [
        {"name": "RLJOB_RAY_HEAD", "value": f"{first_pod_host(attempt)}:{RAY_PORT}"},
        *_literals({"RLJOB_RESTARTS_IN_PLACE": "1"} if attempt.restarts_in_place else {}),
        _from_label("RLJOB_PLAN_GENERATION", labels.PLAN_GENERATION),
        {"name": "RAY_AUTH_MODE", "value": "token"},
        {"name": "RAY_AUTH_TOKEN", "valueFrom": token},
    ]


def _rendezvous_variables(attempt: JobAttempt, group: WorkerPods) -> Variables:
    return [
        {"name": "PET_NNODES", "value": str(group.replicas)},
        _from_label("PET_NODE_RANK", labels.INDEX),
        {"name": "PET_NPROC_PER_NODE", "value": str(max(group.gpus, 1))},
        {"name": "PET_MASTER_ADDR", "value": first_pod_host(attempt)},
        {"name": "PET_MASTER_PORT", "value": str(RENDEZVOUS_PORT)},
    ]


_READ_BY_TORCH = "expandable_segments"
"""torch reads this setting itself, from PYTORCH_CUDA_ALLOC_CONF."""


def plan_variables(plan: MemoryPlan | None, supported_settings: Collection[str]) -> dict[str, str]:
    """Return variables such as RLJOB_PLAN_MICRO_BATCH_TOKENS, for the settings whose names are in `supported_settings`.

    Switches are "1" and "0", shares from "0" to "1", sizes are bytes. Empty if there is no plan yet.
    """
    if plan is None:
        return {}
    values = {
        name: getattr(plan, name)
        for name, field in MemoryPlan.model_fields.items()
        if field.alias in supported_settings and name != _READ_BY_TORCH
    }
    return {
        f"RLJOB_PLAN_{to_snake(name_of(name)).upper()}": f"{value:g}" if isinstance(value, bool | float) else str(value)
        for name, value in values.items()
    }


def _adapter_variables(attempt: JobAttempt) -> dict[str, str]:
    """Return the variables for the adapter in the probe (rljob_probe.adapters). Empty without one."""
    trainer = attempt.spec.trainer
    if trainer is None or trainer.adapter is None or attempt.plan is None:
        return {}
    return {
        "RLJOB_ADAPTER": trainer.adapter,
        "RLJOB_ADAPTER_CHANGES": json.dumps(adapter_changes(attempt.spec, attempt.plan), sort_keys=True),
    }


def _with_user_variables(variables: Variables, spec: RLJobSpec) -> dict[str, Any]:
    """Return the fields `env` and `envFrom`. Variables of the job override defaults; the API refuses names that RLJob
    depends on. `env` takes precedence over `envFrom`."""
    given = {variable.name: variable.model_dump(by_alias=True, exclude_none=True) for variable in spec.env or ()}
    env = [*(entry for entry in variables if entry["name"] not in given), *given.values()]
    sources = [source.model_dump(by_alias=True, exclude_none=True) for source in spec.env_from or ()]
    return {"env": env, "envFrom": sources} if sources else {"env": env}
