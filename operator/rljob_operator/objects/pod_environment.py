"""Environment of the container `rljob`: the job, the role of the pod in it, and memory settings."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from pydantic.alias_generators import to_snake

from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_api.status import Role
from rljob_memory.next_plan import adapter_changes
from rljob_memory.plan_settings import name_of
from rljob_operator import labels, names
from rljob_operator.objects.attempt import JobAttempt
from rljob_operator.objects.pod_layout import WorkerGroup
from rljob_operator.objects.pod_volumes import (
    HOME,
    MANIFEST_DIRECTORY,
    MEMORY_PLAN_FILE,
    MODEL_DIRECTORY,
    TASK_DIRECTORY,
    cache_directory,
    compile_cache_directory,
    has_model_cache,
    has_model_volume,
    has_plan_file,
    mounts_task_files,
    output_directory,
)
from rljob_operator.objects.supporting_objects import (
    ATTEMPT_SETTINGS_KEY,
    MANIFEST_KEY,
    RAY_PORT,
    RENDEZVOUS_PORT,
    TOKEN_KEY,
    first_pod_host,
)

EnvironmentEntries = list[dict[str, Any]]


def literal_entries(variables: Mapping[str, str]) -> EnvironmentEntries:
    return [{"name": name, "value": value} for name, value in variables.items()]


def job_entries(attempt: JobAttempt, role: Role) -> EnvironmentEntries:
    """Variables of every pod, the same for all pods of a role and in all attempts. `RLJOB_ATTEMPT` is the attempt that
    the pod was created for."""
    variables = {
        "RLJOB_NAME": attempt.name,
        "RLJOB_NAMESPACE": attempt.namespace,
        "RLJOB_UID": attempt.uid,
        "RLJOB_ROLE": role,
        "RLJOB_WORKERS": str(attempt.layout.worker_count),
        "RLJOB_MANIFEST": f"{MANIFEST_DIRECTORY}/{MANIFEST_KEY}",
        "RLJOB_OUTPUT": output_directory(attempt),
    }
    if has_model_volume(attempt):
        variables["RLJOB_MODEL_DIR"] = MODEL_DIRECTORY
    if mounts_task_files(attempt, role):
        variables["RLJOB_TASK_DIR"] = TASK_DIRECTORY
    if has_plan_file(attempt):
        variables["RLJOB_MEMORY_PLAN_FILE"] = f"{MANIFEST_DIRECTORY}/{MEMORY_PLAN_FILE}"
    if has_model_cache(attempt):
        variables["RLJOB_CACHE_DIR"] = cache_directory(attempt)
        variables["HF_HUB_CACHE"] = f"{cache_directory(attempt)}/huggingface"
    if role != "controller" and (compiled := compile_cache_directory(attempt)) is not None:
        variables["RLJOB_COMPILE_CACHE_DIR"] = compiled
    home = {"HOME": HOME, "USER": "rljob", "XDG_CACHE_HOME": f"{HOME}/.cache"}
    return [
        *literal_entries(variables),
        _from_label("RLJOB_INDEX", labels.INDEX),
        _from_label("RLJOB_ATTEMPT", labels.ATTEMPT),
        _from_pod("POD_IP", "status.podIP"),
        _from_pod("NODE_NAME", "spec.nodeName"),
        *literal_entries(home),
    ]


def ray_entries(attempt: JobAttempt) -> EnvironmentEntries:
    """Additional variables of RLJob's own trainer."""
    token = {"secretKeyRef": {"name": names.ray_token_secret_name(attempt.name, attempt.uid), "key": TOKEN_KEY}}
    return [
        {"name": "RLJOB_RAY_HEAD", "value": f"{first_pod_host(attempt)}:{RAY_PORT}"},
        *literal_entries({"RLJOB_RESTARTS_IN_PLACE": "1"} if attempt.restarts_in_place else {}),
        {"name": "RLJOB_ATTEMPT_SETTINGS", "value": f"{MANIFEST_DIRECTORY}/{ATTEMPT_SETTINGS_KEY}"},
        _from_label("RLJOB_PLAN_GENERATION", labels.PLAN_GENERATION),
        {"name": "RAY_AUTH_MODE", "value": "token"},
        {"name": "RAY_AUTH_TOKEN", "valueFrom": token},
    ]


def rendezvous_entries(attempt: JobAttempt, group: WorkerGroup) -> EnvironmentEntries:
    """Rendezvous of another trainer, by the variables of torchrun."""
    return [
        {"name": "PET_NNODES", "value": str(group.replicas)},
        _from_label("PET_NODE_RANK", labels.INDEX),
        {"name": "PET_NPROC_PER_NODE", "value": str(max(group.gpus, 1))},
        {"name": "PET_MASTER_ADDR", "value": first_pod_host(attempt)},
        {"name": "PET_MASTER_PORT", "value": str(RENDEZVOUS_PORT)},
    ]


def _from_label(variable: str, label: str) -> dict[str, Any]:
    """A field reference instead of a value: the pods of a role, and those of two attempts, have the same spec."""
    return _from_pod(variable, f"metadata.labels['{label}']")


def _from_pod(variable: str, field: str) -> dict[str, Any]:
    return {"name": variable, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": field}}}


_BY_THE_ALLOCATOR = "expandable_segments"
"""torch reads this setting itself, from PYTORCH_CUDA_ALLOC_CONF."""


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


def adapter_variables(attempt: JobAttempt) -> dict[str, str]:
    """Variables for the adapter in the probe (rljob_probe.adapters). Empty without one."""
    trainer = attempt.spec.trainer
    if trainer is None or trainer.adapter is None or attempt.plan is None:
        return {}
    return {
        "RLJOB_ADAPTER": trainer.adapter,
        "RLJOB_ADAPTER_CHANGES": json.dumps(adapter_changes(attempt.spec, attempt.plan), sort_keys=True),
    }


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


# --- Variables of the user ---


def with_user_entries(entries: list[dict[str, Any]], spec: RLJobSpec) -> list[dict[str, Any]]:
    """`entries` with those of the job, which override defaults. The API refuses names that RLJob depends on."""
    own = {variable.name: variable.model_dump(by_alias=True, exclude_none=True) for variable in spec.env or ()}
    return [*(entry for entry in entries if entry["name"] not in own), *own.values()]


def env_from(spec: RLJobSpec) -> dict[str, Any]:
    """The field `envFrom` of a container; empty if the job has none. Variables of `env` take precedence."""
    sources = [source.model_dump(by_alias=True, exclude_none=True) for source in spec.env_from or ()]
    return {"envFrom": sources} if sources else {}
