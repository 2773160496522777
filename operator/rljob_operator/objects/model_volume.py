"""The volume that holds the model, where the model comes from an image or from a claim."""

from __future__ import annotations

from typing import Any

from rljob_operator.objects.attempt import JobAttempt
from rljob_operator.objects.invalid_template import InvalidTemplate

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
