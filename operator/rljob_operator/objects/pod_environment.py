"""The environment of the container `rljob`: what the trainer knows about its job, its place in it, and its memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rljob_api.status import Role
from rljob_operator import names
from rljob_operator.objects import config_map
from rljob_operator.objects.attempt import JobAttempt, WorkerGroup
from rljob_operator.objects.model_volume import MODEL_DIRECTORY, has_model_volume
from rljob_operator.objects.pod_volumes import HOME, MANIFEST_DIRECTORY, output_directory
from rljob_operator.objects.ray_token_secret import TOKEN_KEY
from rljob_operator.objects.service import RAY_PORT, RENDEZVOUS_PORT, service_host

EnvironmentEntries = list[dict[str, Any]]


def literal_entries(variables: Mapping[str, str]) -> EnvironmentEntries:
    return [{"name": name, "value": value} for name, value in variables.items()]


def job_entries(attempt: JobAttempt, role: Role, index: int) -> EnvironmentEntries:
    """What every pod knows. What changes from attempt to attempt comes by reference, so that containers that are
    restarted in place have it."""
    variables = {
        "RLJOB_NAME": attempt.name,
        "RLJOB_NAMESPACE": attempt.namespace,
        "RLJOB_UID": attempt.uid,
        "RLJOB_ROLE": role,
        "RLJOB_INDEX": str(index),
        "RLJOB_WORKERS": str(attempt.workers),
        "RLJOB_MANIFEST": f"{MANIFEST_DIRECTORY}/{config_map.MANIFEST_KEY}",
        "RLJOB_OUTPUT": output_directory(attempt),
    }
    if has_model_volume(attempt):
        variables["RLJOB_MODEL_DIR"] = MODEL_DIRECTORY
    home = {"HOME": HOME, "USER": "rljob", "XDG_CACHE_HOME": f"{HOME}/.cache"}
    return [
        *literal_entries(variables),
        _from_config_map("RLJOB_ATTEMPT", attempt, config_map.ATTEMPT_KEY),
        _from_config_map("RLJOB_MEMORY_PLAN", attempt, config_map.MEMORY_PLAN_KEY),
        _from_config_map("RLJOB_PLAN_CHANGES", attempt, config_map.PLAN_CHANGES_KEY),
        _from_pod("POD_IP", "status.podIP"),
        _from_pod("NODE_NAME", "spec.nodeName"),
        *literal_entries(home),
    ]


def ray_entries(attempt: JobAttempt) -> EnvironmentEntries:
    """What the pods of RLJob's own trainer know beside that."""
    token = {"secretKeyRef": {"name": names.ray_token_secret_name(attempt.name), "key": TOKEN_KEY}}
    return [
        {"name": "RLJOB_RAY_HEAD", "value": f"{service_host(attempt)}:{RAY_PORT}"},
        *literal_entries({"RLJOB_RESTARTS_IN_PLACE": "1"} if attempt.restarts_in_place else {}),
        _from_config_map("RLJOB_POLICY_ENVIRONMENT", attempt, config_map.POLICY_ENVIRONMENT_KEY),
        _from_config_map("RLJOB_ROLLOUT_ENVIRONMENT", attempt, config_map.ROLLOUT_ENVIRONMENT_KEY),
        {"name": "RAY_AUTH_MODE", "value": "token"},
        {"name": "RAY_AUTH_TOKEN", "valueFrom": token},
    ]


def rendezvous_entries(attempt: JobAttempt, group: WorkerGroup, index: int) -> EnvironmentEntries:
    """How the pods of another trainer find each other, in torchrun's words."""
    return literal_entries(
        {
            "PET_NNODES": str(group.replicas),
            "PET_NODE_RANK": str(index),
            "PET_NPROC_PER_NODE": str(max(group.gpus, 1)),
            "PET_MASTER_ADDR": service_host(attempt),
            "PET_MASTER_PORT": str(RENDEZVOUS_PORT),
        }
    )


def _from_config_map(variable: str, attempt: JobAttempt, key: str) -> dict[str, Any]:
    reference = {"name": names.config_map_name(attempt.name), "key": key, "optional": True}
    return {"name": variable, "valueFrom": {"configMapKeyRef": reference}}


def _from_pod(variable: str, field: str) -> dict[str, Any]:
    return {"name": variable, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": field}}}
