"""Volumes of a pod, their mounts in the container `rljob`, and the variables that lead to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rljob_api.quantity import byte_quantity
from rljob_api.status import Role
from rljob_memory.pod_memory import shared_memory_bytes
from rljob_operator import labels, names
from rljob_operator.objects.attempt import JobAttempt
from rljob_operator.objects.supporting_objects import ATTEMPT_SETTINGS_KEY, MANIFEST_KEY

SHARED_MEMORY_VOLUME = "shm"
RUN_DIRECTORY = "/run/rljob"
_HOME = "/home/rljob"
_JOB_DIRECTORY = "/etc/rljob"
_CHECKPOINT_DIRECTORY = "/var/lib/rljob"
_MODEL_DIRECTORY = "/var/lib/rljob-model"
_TASK_DIRECTORY = "/var/lib/rljob-task"
_CACHE_DIRECTORY = "/var/lib/rljob-cache"
_MEMORY_PLAN_FILE = "memory-plan.json"

FIXED_VOLUMES = {
    "checkpoints": "write spec.checkpoint.volume",
    "job": "it holds the manifest of the job",
    "model": "write spec.model.uri",
    "model-cache": "write spec.model.cache",
    "task-files": "write spec.task.files",
}
"""Volumes that a template cannot override, with the reason or the field to use instead."""


@dataclass(frozen=True, slots=True)
class MountedVolume:
    """A volume and its mount."""

    name: str
    source: dict[str, Any]
    directory: str
    path: str | None = None
    """Directory in the volume; None mounts the whole volume."""
    read_only: bool = False
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def volume(self) -> dict[str, Any]:
        return {"name": self.name, **self.source}

    @property
    def mount(self) -> dict[str, Any]:
        options = {"subPath": self.path or None, "readOnly": self.read_only or None}
        given = {name: value for name, value in options.items() if value is not None}
        return {"name": self.name, "mountPath": self.directory, **given}


def mounted_volumes(attempt: JobAttempt, role: Role) -> list[MountedVolume]:
    """Return the volumes of a pod. The root file system is read-only, so all output goes to a volume."""
    prediction = None if role == "controller" else attempt.prediction
    predicted_bytes = shared_memory_bytes(prediction) if prediction else 0
    size = byte_quantity(max(attempt.settings.shared_memory_bytes, predicted_bytes))
    memory = {"emptyDir": {"medium": "Memory", "sizeLimit": size}}
    home = {"HOME": _HOME, "USER": "rljob", "XDG_CACHE_HOME": f"{_HOME}/.cache"}
    volumes = [
        MountedVolume(SHARED_MEMORY_VOLUME, memory, "/dev/shm"),
        MountedVolume("tmp", {"emptyDir": {}}, "/tmp"),
        MountedVolume("home", {"emptyDir": {}}, _HOME, variables=home),
        MountedVolume("run", {"emptyDir": {}}, RUN_DIRECTORY),
        _job(attempt),
        _checkpoints(attempt, role),
    ]
    if attempt.spec.model.uri.startswith(("oci://", "pvc://")):
        volumes.append(_model(attempt))
    # The controller reads prompts and computes rewards, policy ranks load a loss. Pods of another trainer may do both.
    reads_files = role == "controller" or (role == "policy" and attempt.spec.algorithm.loss is not None)
    if attempt.spec.task.files is not None and (reads_files or not attempt.own_trainer):
        volumes.append(_task_files(attempt))
    cache = attempt.spec.model.cache
    if cache is not None and (_has_hub_cache(attempt) or (attempt.own_trainer and cache.compiled)):
        claim = {"persistentVolumeClaim": {"claimName": cache.persistent_volume_claim}}
        volumes.append(MountedVolume("model-cache", claim, _CACHE_DIRECTORY, cache.path))
    return volumes


def has_plan_file(attempt: JobAttempt) -> bool:
    """Return True for the pods of another trainer, which cannot compare generations, once there is a plan."""
    return not attempt.own_trainer and attempt.plan is not None


def _job(attempt: JobAttempt) -> MountedVolume:
    """The manifest, and the settings of the attempt or the plan of another trainer."""
    files = {"RLJOB_MANIFEST": MANIFEST_KEY}
    if attempt.own_trainer:
        files["RLJOB_ATTEMPT_SETTINGS"] = ATTEMPT_SETTINGS_KEY
    items = [{"key": key, "path": key} for key in files.values()]
    source: dict[str, Any] = {"configMap": {"name": names.object_name(attempt.name), "items": items}}
    if has_plan_file(attempt):
        # From the pod itself, since a node may still have the ConfigMap of an earlier attempt.
        plan = {"fieldPath": f"metadata.annotations['{labels.MEMORY_PLAN}']", "apiVersion": "v1"}
        plan_file = {"downwardAPI": {"items": [{"path": _MEMORY_PLAN_FILE, "fieldRef": plan}]}}
        source = {"projected": {"sources": [source, plan_file]}}
        files["RLJOB_MEMORY_PLAN_FILE"] = _MEMORY_PLAN_FILE
    variables = {name: f"{_JOB_DIRECTORY}/{file}" for name, file in files.items()}
    return MountedVolume("job", source, _JOB_DIRECTORY, read_only=True, variables=variables)


def _checkpoints(attempt: JobAttempt, role: Role) -> MountedVolume:
    source = attempt.spec.checkpoint.volume_source(attempt.name)
    variables = {"RLJOB_OUTPUT": _output_directory(attempt), **_cache_variables(attempt, role)}
    return MountedVolume("checkpoints", source, _CHECKPOINT_DIRECTORY, variables=variables)


def _output_directory(attempt: JobAttempt) -> str:
    return f"{_CHECKPOINT_DIRECTORY}/{attempt.spec.checkpoint.directory(attempt.name)}".rstrip("/")


def _model(attempt: JobAttempt) -> MountedVolume:
    """oci://registry/name:tag or pvc://claim/path/within."""
    scheme, _, location = attempt.spec.model.uri.partition("://")
    claim, _, path = location.partition("/")
    source: dict[str, Any] = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    if scheme == "oci":
        source, path = {"image": {"reference": location, "pullPolicy": "IfNotPresent"}}, ""
    variables = {"RLJOB_MODEL_DIR": _MODEL_DIRECTORY}
    return MountedVolume("model", source, _MODEL_DIRECTORY, path.strip("/"), read_only=True, variables=variables)


def _task_files(attempt: JobAttempt) -> MountedVolume:
    files = attempt.spec.task.files
    assert files is not None
    source: dict[str, Any] = {"configMap": {"name": files.config_map}}
    if files.config_map is None:
        source = {"persistentVolumeClaim": {"claimName": files.persistent_volume_claim, "readOnly": True}}
    variables = {"RLJOB_TASK_DIR": _TASK_DIRECTORY}
    return MountedVolume("task-files", source, _TASK_DIRECTORY, files.path, read_only=True, variables=variables)


def _cache_variables(attempt: JobAttempt, role: Role) -> dict[str, str]:
    """Return the directories of the cache of models and data sets, and of the compiled code of RLJob's own trainer.

    They are on the claim that the job names, else on the checkpoints' volume: those of the hub in a directory whose
    name no job can have, compiled code among the files of this job, which its pods trust anyway.
    """
    spec, claim, variables = attempt.spec, attempt.spec.model.cache, {}
    if _has_hub_cache(attempt):
        directory = f"{_CHECKPOINT_DIRECTORY}/.model-cache" if claim is None else _CACHE_DIRECTORY
        variables = {"RLJOB_CACHE_DIR": directory, "HF_HUB_CACHE": f"{directory}/huggingface"}
        if spec.task.name == "dataset":
            variables["HF_DATASETS_CACHE"] = f"{directory}/datasets"
    if attempt.own_trainer and role != "controller" and spec.policy.gpus_per_replica:
        if claim is not None and claim.compiled:
            variables["RLJOB_COMPILE_CACHE_DIR"] = f"{_CACHE_DIRECTORY}/compiled"
        elif "emptyDir" not in spec.checkpoint.volume_source(attempt.name):
            variables["RLJOB_COMPILE_CACHE_DIR"] = f"{_output_directory(attempt)}/.compile-cache"
    return variables


def _has_hub_cache(attempt: JobAttempt) -> bool:
    """Another trainer keeps its own cache unless the job names one."""
    return attempt.spec.uses_hub and (attempt.own_trainer or attempt.spec.model.cache is not None)
