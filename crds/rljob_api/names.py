"""Names of the API and limits on the names of jobs."""

from __future__ import annotations

GROUP = "rljob.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

MAX_JOB_NAME_LENGTH = 48
"""Pods, Services and Secrets are named after their job, with a suffix; a name has at most 63 characters."""
JOB_NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
"""A DNS-1035 label, which the job's headless Service requires."""


def checkpoint_claim_name(job: str) -> str:
    """Name of the claim that the operator creates for a job."""
    return f"{job}-checkpoints"
