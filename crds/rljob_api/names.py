"""Names that identify the API and the objects made for a job."""

from __future__ import annotations

GROUP = "rljob.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

MAX_JOB_NAME_LENGTH = 48
"""Names of pods, Services and Secrets are a job's name and a suffix, at most 63 characters together."""
JOB_NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
"""A DNS-1035 label, as the job's headless Service needs it."""
