"""Volumes of a pod, and their mounts in the container `rljob`."""

from __future__ import annotations

from typing import Any

from rljob_api.mounted_files import ModelCache
from rljob_api.quantity import byte_quantity
from rljob_api.status import Role
from rljob_memory.pod_memory import shared_memory_bytes
from rljob_operator import labels, names
from rljob_operator.objects.attempt import JobAttempt
from rljob_operator.objects.predicted_memory import predicted_memory
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
    """Volumes and their mounts. The root file system is read-only, so all output goes to a volume."""
    volumes = [
        {
            "name": SHARED_MEMORY_VOLUME,
            "emptyDir": {"medium": "Memory", "sizeLimit": byte_quantity(_shared_memory_bytes(attempt, role))},
        },
        {"name": "tmp", "emptyDir": {}},
        {"name": "home", "emptyDir": {}},
        {"name": "run", "emptyDir": {}},
        _job_volume(attempt),
        {"name": "checkpoints", **attempt.spec.checkpoint.volume_source(attempt.name)},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": SHARED_MEMORY_VOLUME, "mountPath": "/dev/shm"},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "home", "mountPath": HOME},
        {"name": "run", "mountPath": RUN_DIRECTORY},
        {"name": "job", "mountPath": MANIFEST_DIRECTORY, "readOnly": True},
        {"name": "checkpoints", "mountPath": CHECKPOINT_DIRECTORY},
    ]
    if has_model_volume(attempt):
        volume, mount = model_volume(attempt)
        volumes.append(volume)
        mounts.append(mount)
    if mounts_task_files(attempt, role):
        volume, mount = _task_files_volume(attempt)
        volumes.append(volume)
        mounts.append(mount)
    if attempt.spec.model.cache is not None and (has_model_cache(attempt) or shares_compiled_code(attempt)):
        volume, mount = _model_cache_volume(attempt.spec.model.cache)
        volumes.append(volume)
        mounts.append(mount)
    return volumes, mounts


def _shared_memory_bytes(attempt: JobAttempt, role: Role) -> int:
    """Size of /dev/shm: the installation's, or the prediction if that is larger."""
    prediction = None if role == "controller" else predicted_memory(attempt.spec)
    predicted_bytes = 0 if prediction is None else shared_memory_bytes(prediction)
    return max(attempt.settings.shared_memory_bytes, predicted_bytes)


MEMORY_PLAN_FILE = "memory-plan.json"


def _job_volume(attempt: JobAttempt) -> dict[str, Any]:
    """The manifest, and the settings of the attempt or the plan of another trainer."""
    keys = (MANIFEST_KEY, ATTEMPT_SETTINGS_KEY) if attempt.own_trainer else (MANIFEST_KEY,)
    config_map = {
        "name": names.config_map_name(attempt.name),
        "items": [{"key": key, "path": key} for key in keys],
    }
    if not has_plan_file(attempt):
        return {"name": "job", "configMap": config_map}
    # From the pod itself, since a node may still have the ConfigMap of an earlier attempt.
    plan = {"fieldPath": f"metadata.annotations['{labels.MEMORY_PLAN}']", "apiVersion": "v1"}
    plan_file = {"downwardAPI": {"items": [{"path": MEMORY_PLAN_FILE, "fieldRef": plan}]}}
    return {"name": "job", "projected": {"sources": [{"configMap": config_map}, plan_file]}}


def has_plan_file(attempt: JobAttempt) -> bool:
    """True for the pods of another trainer, which cannot compare generations, once there is a plan."""
    return not attempt.own_trainer and attempt.plan is not None


def output_directory(attempt: JobAttempt) -> str:
    """Output directory of the job."""
    return f"{CHECKPOINT_DIRECTORY}/{attempt.spec.checkpoint.directory(attempt.name)}".rstrip("/")


MODEL_VOLUME = "model"
MODEL_DIRECTORY = "/var/lib/rljob-model"


def has_model_volume(attempt: JobAttempt) -> bool:
    return attempt.spec.model.uri.startswith(("oci://", "pvc://"))


def model_volume(attempt: JobAttempt) -> tuple[dict[str, Any], dict[str, Any]]:
    """The volume and its read-only mount, for oci://registry/name:tag and pvc://claim/path/within."""
    scheme, _, location = attempt.spec.model.uri.partition("://")
    mount = {"name": MODEL_VOLUME, "mountPath": MODEL_DIRECTORY, "readOnly": True}
    if scheme == "oci":
        return {"name": MODEL_VOLUME, "image": {"reference": location, "pullPolicy": "IfNotPresent"}}, mount
    claim, _, path = location.partition("/")
    if path.strip("/"):
        mount["subPath"] = path.strip("/")
    return {"name": MODEL_VOLUME, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}, mount


TASK_DIRECTORY = "/var/lib/rljob-task"


def mounts_task_files(attempt: JobAttempt, role: Role) -> bool:
    """True for the controller, which reads prompts and computes rewards, and for all pods of another trainer."""
    return attempt.spec.task.files is not None and (role == "controller" or not attempt.own_trainer)


def _task_files_volume(attempt: JobAttempt) -> tuple[dict[str, Any], dict[str, Any]]:
    files = attempt.spec.task.files
    assert files is not None
    mount = {"name": "task-files", "mountPath": TASK_DIRECTORY, "readOnly": True}
    if files.config_map is not None:
        return {"name": "task-files", "configMap": {"name": files.config_map}}, mount
    if files.path is not None:
        mount["subPath"] = files.path
    claim = {"claimName": files.persistent_volume_claim, "readOnly": True}
    return {"name": "task-files", "persistentVolumeClaim": claim}, mount


CACHE_DIRECTORY = "/var/lib/rljob-cache"


def has_model_cache(attempt: JobAttempt) -> bool:
    """True for a model of the hub. Another trainer keeps its own cache unless the job names one."""
    model = attempt.spec.model
    return model.uri.startswith("hf://") and (attempt.own_trainer or model.cache is not None)


def cache_directory(attempt: JobAttempt) -> str:
    """Directory of the model cache. On the checkpoints' volume its name is none that a job can have."""
    return f"{CHECKPOINT_DIRECTORY}/.model-cache" if attempt.spec.model.cache is None else CACHE_DIRECTORY


def shares_compiled_code(attempt: JobAttempt) -> bool:
    """True if the job names a claim on which jobs share compiled code. Another trainer keeps its own cache."""
    cache = attempt.spec.model.cache
    return attempt.own_trainer and cache is not None and cache.compiled


def compile_cache_directory(attempt: JobAttempt) -> str | None:
    """Directory in which the workers keep compiled code; None if nothing is compiled, or nothing can be kept.

    By default it is among the files of this job, which its pods trust anyway.
    """
    if not attempt.own_trainer or attempt.spec.policy.gpus_per_replica == 0:
        return None
    if shares_compiled_code(attempt):
        return f"{CACHE_DIRECTORY}/compiled"
    if "emptyDir" in attempt.spec.checkpoint.volume_source(attempt.name):
        return None
    return f"{output_directory(attempt)}/.compile-cache"


def _model_cache_volume(cache: ModelCache) -> tuple[dict[str, Any], dict[str, Any]]:
    mount = {"name": "model-cache", "mountPath": CACHE_DIRECTORY}
    if cache.path is not None:
        mount["subPath"] = cache.path
    return {"name": "model-cache", "persistentVolumeClaim": {"claimName": cache.persistent_volume_claim}}, mount
