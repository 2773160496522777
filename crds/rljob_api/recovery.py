"""How often a job that failed is helped up again."""

from __future__ import annotations

from pydantic import Field

from rljob_api.api_model import ApiModel
from rljob_api.quantity import Bytes


class RecoverySpec(ApiModel):
    """Adjustments (the memory plan changes, progress is expected) and restarts (same plan) are counted apart."""

    max_adjustments: int = Field(default=6, ge=0, le=100)
    """Changes of the memory plan before the job is given up. Progress gives them back slowly."""

    max_restarts: int = Field(default=3, ge=0, le=100)
    """Restarts under the same plan, after failures that have nothing to do with memory, before the job is given up."""

    max_host_memory: Bytes | None = None
    """The most host memory that a pod may be given, as a Kubernetes quantity. Absent: what its template asks for."""

    max_shared_memory: Bytes | None = None
    """The most that /dev/shm may be given, as a Kubernetes quantity. It counts as host memory of the pod that writes
    to it. Absent: half the memory limit of the pod."""
