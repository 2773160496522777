"""Names, labels and the owner of every object of a job."""

from __future__ import annotations

from typing import Any

from rljob_api.metadata import API_VERSION
from rljob_api.status import Role
from rljob_operator import labels
from rljob_operator.objects.attempt import JobAttempt

Manifest = dict[str, Any]
"""A Kubernetes object as plain data."""


def job_labels(attempt: JobAttempt, component: str) -> dict[str, str]:
    """Labels of an object of `component`: a role, or `job` for what belongs to the job as a whole."""
    return {
        labels.JOB_NAME: attempt.name,
        labels.JOB_UID: attempt.uid,
        "app.kubernetes.io/name": "rljob",
        "app.kubernetes.io/instance": attempt.name,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/part-of": "rljob",
        labels.MANAGED_BY: labels.MANAGED_BY_OPERATOR,
    }


def pod_labels(attempt: JobAttempt, role: Role) -> dict[str, str]:
    """Labels of the first pod of a role. Those of the installation too; RLJob's own win."""
    return {
        **attempt.settings.pod_labels,
        **job_labels(attempt, role),
        labels.ROLE: role,
        labels.INDEX: "0",
        labels.ATTEMPT: str(attempt.number),
        labels.PLAN_GENERATION: str(attempt.plan.generation if attempt.plan else 1),
    }


def object_metadata(attempt: JobAttempt, name: str, component: str = "job") -> dict[str, Any]:
    """Metadata of an object that lives and goes with the job."""
    return {
        "name": name,
        "namespace": attempt.namespace,
        "labels": job_labels(attempt, component),
        "ownerReferences": [owner_reference(attempt)],
    }


def shared_metadata(attempt: JobAttempt, name: str) -> dict[str, Any]:
    """Metadata of an object that all jobs of the namespace use. It is the same for each of them, and no job owns it."""
    shared = {
        "app.kubernetes.io/name": "rljob",
        "app.kubernetes.io/part-of": "rljob",
        labels.MANAGED_BY: labels.MANAGED_BY_OPERATOR,
        labels.SHARED: "true",
    }
    return {"name": name, "namespace": attempt.namespace, "labels": shared}


def is_shared(manifest: Manifest) -> bool:
    """True for an object that all jobs of the namespace use."""
    return labels.SHARED in (manifest["metadata"].get("labels") or {})


def owner_reference(attempt: JobAttempt) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": "RLJob",
        "name": attempt.name,
        "uid": attempt.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
