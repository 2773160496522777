"""Names of the API, and the metadata of Kubernetes objects in manifests and from the API server."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from rljob_api.api_model import ApiModel, Text, Timestamp

GROUP = "rljob.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

JOB_NAME_LABEL = f"{GROUP}/job-name"
ROLE_LABEL = f"{GROUP}/role"
INDEX_LABEL = f"{GROUP}/index"
"""Labels of a job's pods: its name, the role, and the number within the role, from 0."""

MAX_JOB_NAME_LENGTH = 48
"""Pods, Services and Secrets are named after their job, with a suffix; a name has at most 63 characters."""
JOB_NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
"""A DNS-1035 label, which the job's headless Service requires."""


def checkpoint_claim_name(job: str) -> str:
    """Name of the claim that the operator creates for a job."""
    return f"{job}-checkpoints"


JobName = Annotated[
    str,
    Text(
        pattern=JOB_NAME_PATTERN,
        expected="a name of lower-case letters, digits and -, that begins with a letter and does not end with -",
        max_length=MAX_JOB_NAME_LENGTH,
    ),
]


NamespaceName = Annotated[
    str,
    Text(
        pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
        expected="a name of lower-case letters, digits and -, that begins and ends with a letter or digit",
        max_length=63,
    ),
]


class Metadata(ApiModel):
    """Kubernetes object metadata. Manifests set name, namespace, labels and annotations; the API server sets the
    rest."""

    name: JobName
    """Name of the job. The names of its pods begin with it."""
    namespace: NamespaceName | None = None
    """Namespace of the job."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations."""
    finalizers: list[str] = Field(default_factory=list)
    """Finalizers, which must be removed before the object is deleted."""
    uid: str | None = None
    """Set by the API server."""
    resource_version: str | None = None
    """Set by the API server."""
    generation: int | None = None
    """Set by the API server: generation of the spec."""
    creation_timestamp: Timestamp | None = None
    """Set by the API server."""
    deletion_timestamp: Timestamp | None = None
    """Set by the API server: time of the request to delete the object."""
    deletion_grace_period_seconds: int | None = None
    """Set by the API server: seconds until the object may be deleted."""
    generate_name: str | None = None
    """Prefix from which the API server generated the name."""
    self_link: str | None = None
    """Set by old API servers."""
    owner_references: list[dict[str, Any]] = Field(default_factory=list)
    """Objects that own this one."""
    managed_fields: list[dict[str, Any]] = Field(default_factory=list)
    """Set by the API server: the writer of each field."""


def job_name_rules() -> list[dict[str, str]]:
    """CEL rules for the name of a job. The API server's schema of metadata allows longer names."""
    return [
        {
            "rule": f"size(self.metadata.name) <= {MAX_JOB_NAME_LENGTH}",
            "message": f"metadata.name must have at most {MAX_JOB_NAME_LENGTH} characters: pod names begin with it",
        },
        {
            "rule": f"self.metadata.name.matches('{JOB_NAME_PATTERN}')",
            "message": "metadata.name must consist of lower-case letters, digits and -, begin with a letter and not "
            "end with -",
        },
    ]
