"""Volumes of a pod, and their mounts in the container `rljob`."""

from __future__ import annotations

from typing import Any

from rljob_api.quantity import byte_quantity
from rljob_operator import names
from rljob_operator.objects.attempt import JobAttempt
from rljob_operator.objects.invalid_template import InvalidTemplate
from rljob_operator.objects.supporting_objects import MANIFEST_KEY

SHARED_MEMORY_VOLUME = "shm"
HOME = "/home/rljob"
MANIFEST_DIRECTORY = "/etc/rljob"
CHECKPOINT_DIRECTORY = "/var/lib/rljob"
RUN_DIRECTORY = "/run/rljob"

FIXED_VOLUMES = {
    "checkpoints": "write spec.checkpoint.volume",
    "job": "it holds the manifest of the job",
    "model": "write spec.model.uri",
}
"""Volumes that a template cannot override, with the reason or the field to use instead."""


def pod_volumes(attempt: JobAttempt) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Volumes and their mounts. The root file system is read-only, so all output goes to a volume."""
    volumes = [
        {
            "name": SHARED_MEMORY_VOLUME,
            "emptyDir": {"medium": "Memory", "sizeLimit": byte_quantity(attempt.settings.shared_memory_bytes)},
        },
        {"name": "tmp", "emptyDir": {}},
        {"name": "home", "emptyDir": {}},
        {"name": "run", "emptyDir": {}},
        {
            "name": "job",
            "configMap": {
                "name": names.config_map_name(attempt.name),
                "items": [{"key": MANIFEST_KEY, "path": MANIFEST_KEY}],
            },
        },
        {"name": "checkpoints", **_checkpoint_source(attempt)},
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
    return volumes, mounts


def output_directory(attempt: JobAttempt) -> str:
    """Output directory of the job. A volume that the user names may be shared by jobs, so it is named after the job."""
    if attempt.spec.checkpoint.volume is None:
        return CHECKPOINT_DIRECTORY
    return f"{CHECKPOINT_DIRECTORY}/{attempt.name}"


def _checkpoint_source(attempt: JobAttempt) -> dict[str, Any]:
    if attempt.spec.checkpoint.volume is not None:
        return {source: value for source, value in attempt.spec.checkpoint.volume.items() if source != "name"}
    return {"persistentVolumeClaim": {"claimName": names.checkpoint_claim_name(attempt.name)}}


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
    if not claim or ".." in path.split("/"):
        raise InvalidTemplate(f"spec.model.uri: expected pvc://claim/path without .., found {attempt.spec.model.uri}")
    if path.strip("/"):
        mount["subPath"] = path.strip("/")
    return {"name": MODEL_VOLUME, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}, mount
