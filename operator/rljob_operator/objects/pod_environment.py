"""Environment of the container `rljob`: the job, the role of the pod in it, and memory settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic.alias_generators import to_snake

from rljob_api.memory_plan import MemoryPlan
from rljob_api.status import Role
from rljob_memory.recovery.plan_text import name_of
from rljob_operator import names
from rljob_operator.objects.attempt import JobAttempt
from rljob_operator.objects.pod_layout import WorkerGroup
from rljob_operator.objects.pod_volumes import (
    HOME,
    MANIFEST_DIRECTORY,
    MODEL_DIRECTORY,
    has_model_volume,
    output_directory,
)
from rljob_operator.objects.supporting_objects import (
    ATTEMPT_KEY,
    MANIFEST_KEY,
    MEMORY_PLAN_KEY,
    PLAN_CHANGES_KEY,
    POLICY_ENVIRONMENT_KEY,
    RAY_PORT,
    RENDEZVOUS_PORT,
    ROLLOUT_ENVIRONMENT_KEY,
    TOKEN_KEY,
    service_host,
)

EnvironmentEntries = list[dict[str, Any]]


def literal_entries(variables: Mapping[str, str]) -> EnvironmentEntries:
    return [{"name": name, "value": value} for name, value in variables.items()]


def job_entries(attempt: JobAttempt, role: Role, index: int) -> EnvironmentEntries:
    """Variables of every pod. Values that change between attempts are references, which containers that are
    restarted in place read again."""
    variables = {
        "RLJOB_NAME": attempt.name,
        "RLJOB_NAMESPACE": attempt.namespace,
        "RLJOB_UID": attempt.uid,
        "RLJOB_ROLE": role,
        "RLJOB_INDEX": str(index),
        "RLJOB_WORKERS": str(attempt.layout.worker_count),
        "RLJOB_MANIFEST": f"{MANIFEST_DIRECTORY}/{MANIFEST_KEY}",
        "RLJOB_OUTPUT": output_directory(attempt),
    }
    if has_model_volume(attempt):
        variables["RLJOB_MODEL_DIR"] = MODEL_DIRECTORY
    home = {"HOME": HOME, "USER": "rljob", "XDG_CACHE_HOME": f"{HOME}/.cache"}
    return [
        *literal_entries(variables),
        _from_config_map("RLJOB_ATTEMPT", attempt, ATTEMPT_KEY),
        _from_config_map("RLJOB_MEMORY_PLAN", attempt, MEMORY_PLAN_KEY),
        _from_config_map("RLJOB_PLAN_CHANGES", attempt, PLAN_CHANGES_KEY),
        _from_pod("POD_IP", "status.podIP"),
        _from_pod("NODE_NAME", "spec.nodeName"),
        *literal_entries(home),
    ]


def ray_entries(attempt: JobAttempt) -> EnvironmentEntries:
    """Additional variables of RLJob's own trainer."""
    token = {"secretKeyRef": {"name": names.ray_token_secret_name(attempt.name, attempt.uid), "key": TOKEN_KEY}}
    return [
        {"name": "RLJOB_RAY_HEAD", "value": f"{service_host(attempt)}:{RAY_PORT}"},
        *literal_entries({"RLJOB_RESTARTS_IN_PLACE": "1"} if attempt.restarts_in_place else {}),
        _from_config_map("RLJOB_POLICY_ENVIRONMENT", attempt, POLICY_ENVIRONMENT_KEY),
        _from_config_map("RLJOB_ROLLOUT_ENVIRONMENT", attempt, ROLLOUT_ENVIRONMENT_KEY),
        {"name": "RAY_AUTH_MODE", "value": "token"},
        {"name": "RAY_AUTH_TOKEN", "valueFrom": token},
    ]


def rendezvous_entries(attempt: JobAttempt, group: WorkerGroup, index: int) -> EnvironmentEntries:
    """Rendezvous of another trainer, by the variables of torchrun."""
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


_BY_THE_ALLOCATOR = "expandable_segments"
"""torch reads this one by itself, from PYTORCH_CUDA_ALLOC_CONF."""


def plan_variables(plan: MemoryPlan | None, supported_settings: Collection[str]) -> dict[str, str]:
    """Variables such as RLJOB_PLAN_MICRO_BATCH_TOKENS, for the settings whose names are in `supported_settings`.

    Switches are "1" and "0", sizes are bytes. Empty if there is no plan yet.
    """
    if plan is None:
        return {}
    return {
        f"RLJOB_PLAN_{to_snake(name_of(name)).upper()}": _text(getattr(plan, name))
        for name, field in MemoryPlan.model_fields.items()
        if field.alias in supported_settings and name != _BY_THE_ALLOCATOR
    }


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
