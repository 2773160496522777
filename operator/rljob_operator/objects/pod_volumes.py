"""Volumes of a pod, and their mounts in the container `rljob`."""

from __future__ import annotations

from typing import Any

from rljob_api.quantity import byte_quantity
from rljob_api.status import Role
from rljob_operator import labels, names
from rljob_operator.objects.attempt import JobAttempt
from rljob_operator.objects.supporting_objects import ATTEMPT_SETTINGS_KEY, MANIFEST_KEY

SHARED_MEMORY_VOLUME = "shm"
HOME = "/home/rljob"
MANIFEST_DIRECTORY = "/etc/rljob"
CHECKPOINT_DIRECTORY = "/var/lib/rljob"
RUN_DIRECTORY = "/run/rljob"

FIXED_VOLUMES = {
    "checkpoints": "write spec.checkpoint.volume",
    "job": "it holds the manifest of the job",
    "model": "write spec.model.uri",
    "model-cache": "write spec.model.cache",
    "task-files": "write spec.task.files",
}
"""Volumes that a template cannot override, with the reason or the field to use instead."""


def pod_volumes(attempt: JobAttempt, role: Role) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the volumes and their mounts. The root file system is read-only, so all output goes to a volume."""
    prediction = None if role == "controller" else attempt.prediction
    shared_memory_bytes = max(attempt.settings.shared_memory_bytes, prediction.shared_memory_bytes if prediction else 0)
    memory = {"medium": "Memory", "sizeLimit": byte_quantity(shared_memory_bytes)}
    mounted: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (SHARED_MEMORY_VOLUME, {"emptyDir": memory}, {"mountPath": "/dev/shm"}),
        ("tmp", {"emptyDir": {}}, {"mountPath": "/tmp"}),
        ("home", {"emptyDir": {}}, {"mountPath": HOME}),
        ("run", {"emptyDir": {}}, {"mountPath": RUN_DIRECTORY}),
        ("job", _job_files(attempt), {"mountPath": MANIFEST_DIRECTORY, "readOnly": True}),
        ("checkpoints", attempt.spec.checkpoint.volume_source(attempt.name), {"mountPath": CHECKPOINT_DIRECTORY}),
    ]
    if has_model_volume(attempt):
        mounted.append(("model", *_model(attempt)))
    if mounts_task_files(attempt, role):
        mounted.append(("task-files", *_task_files(attempt)))
    cache = attempt.spec.model.cache
    if cache is not None and (has_model_cache(attempt) or shares_compiled_code(attempt)):
        claim = {"claimName": cache.persistent_volume_claim}
        mounted.append(("model-cache", {"persistentVolumeClaim": claim}, _mount(CACHE_DIRECTORY, cache.path)))
    volumes = [{"name": name, **source} for name, source, _ in mounted]
    return volumes, [{"name": name, **mount} for name, _, mount in mounted]


def _mount(directory: str, path: str | None) -> dict[str, Any]:
    """Mount a volume, or the directory `path` of it."""
    return {"mountPath": directory, **({"subPath": path} if path else {})}


MEMORY_PLAN_FILE = "memory-plan.json"


def _job_files(attempt: JobAttempt) -> dict[str, Any]:
    """The manifest, and the settings of the attempt or the plan of another trainer."""
    keys = (MANIFEST_KEY, ATTEMPT_SETTINGS_KEY) if attempt.own_trainer else (MANIFEST_KEY,)
    config_map = {"name": names.object_name(attempt.name), "items": [{"key": key, "path": key} for key in keys]}
    if not has_plan_file(attempt):
        return {"configMap": config_map}
    # From the pod itself, since a node may still have the ConfigMap of an earlier attempt.
    plan = {"fieldPath": f"metadata.annotations['{labels.MEMORY_PLAN}']", "apiVersion": "v1"}
    plan_file = {"downwardAPI": {"items": [{"path": MEMORY_PLAN_FILE, "fieldRef": plan}]}}
    return {"projected": {"sources": [{"configMap": config_map}, plan_file]}}


def has_plan_file(attempt: JobAttempt) -> bool:
    """Return True for the pods of another trainer, which cannot compare generations, once there is a plan."""
    return not attempt.own_trainer and attempt.plan is not None


def output_directory(attempt: JobAttempt) -> str:
    """Return the output directory of the job."""
    return f"{CHECKPOINT_DIRECTORY}/{attempt.spec.checkpoint.directory(attempt.name)}".rstrip("/")


MODEL_DIRECTORY = "/var/lib/rljob-model"


def has_model_volume(attempt: JobAttempt) -> bool:
    return attempt.spec.model.uri.startswith(("oci://", "pvc://"))


def _model(attempt: JobAttempt) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return source and mount for oci://registry/name:tag and pvc://claim/path/within."""
    scheme, _, location = attempt.spec.model.uri.partition("://")
    claim, _, path = location.partition("/")
    source: dict[str, Any]
    if scheme == "oci":
        source, path = {"image": {"reference": location, "pullPolicy": "IfNotPresent"}}, ""
    else:
        source = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    return source, {**_mount(MODEL_DIRECTORY, path.strip("/")), "readOnly": True}


TASK_DIRECTORY = "/var/lib/rljob-task"


def mounts_task_files(attempt: JobAttempt, role: Role) -> bool:
    """Return True for the controller, which reads prompts and computes rewards, and for all pods of another trainer."""
    return attempt.spec.task.files is not None and (role == "controller" or not attempt.own_trainer)


def _task_files(attempt: JobAttempt) -> tuple[dict[str, Any], dict[str, Any]]:
    files = attempt.spec.task.files
    assert files is not None
    mount = {**_mount(TASK_DIRECTORY, files.path), "readOnly": True}
    if files.config_map is not None:
        return {"configMap": {"name": files.config_map}}, mount
    return {"persistentVolumeClaim": {"claimName": files.persistent_volume_claim, "readOnly": True}}, mount


CACHE_DIRECTORY = "/var/lib/rljob-cache"


def has_model_cache(attempt: JobAttempt) -> bool:
    """Return True for a model of the hub. Another trainer keeps its own cache unless the job names one."""
    model = attempt.spec.model
    return model.uri.startswith("hf://") and (attempt.own_trainer or model.cache is not None)


def cache_directory(attempt: JobAttempt) -> str:
    """Return the directory of the model cache. On the checkpoints' volume its name is none that a job can have."""
    return f"{CHECKPOINT_DIRECTORY}/.model-cache" if attempt.spec.model.cache is None else CACHE_DIRECTORY


def shares_compiled_code(attempt: JobAttempt) -> bool:
    """Return True if the job names a claim on which jobs share compiled code. Another trainer keeps its own cache."""
    cache = attempt.spec.model.cache
    return attempt.own_trainer and cache is not None and cache.compiled


def compile_cache_directory(attempt: JobAttempt) -> str | None:
    """Return the directory in which the workers keep compiled code; None if nothing is compiled or can be kept.

    By default it is among the files of this job, which its pods trust anyway.
    """
    if not attempt.own_trainer or attempt.spec.policy.gpus_per_replica == 0:
        return None
    if shares_compiled_code(attempt):
        return f"{CACHE_DIRECTORY}/compiled"
    if "emptyDir" in attempt.spec.checkpoint.volume_source(attempt.name):
        return None
    return f"{output_directory(attempt)}/.compile-cache"
