"""The claim for checkpoints and rollouts of a job that names no volume of its own."""

from __future__ import annotations

from typing import Any

from rljob_api.quantity import byte_quantity
from rljob_operator import names
from rljob_operator.objects.attempt import JobAttempt
from rljob_operator.objects.metadata import Manifest, object_metadata


def build_checkpoint_claim(attempt: JobAttempt) -> Manifest:
    """ReadWriteMany: every pod of the job writes to it, from whatever node. It goes with the job."""
    checkpoint, settings = attempt.spec.checkpoint, attempt.settings
    spec: dict[str, Any] = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": byte_quantity(checkpoint.size or settings.checkpoint_claim_bytes)}},
    }
    storage_class = checkpoint.storage_class_name or settings.checkpoint_storage_class
    if storage_class is not None:
        spec["storageClassName"] = storage_class
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": object_metadata(attempt, names.checkpoint_claim_name(attempt.name)),
        "spec": spec,
    }
