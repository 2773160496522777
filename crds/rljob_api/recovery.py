"""Limits on automatic recovery."""

from __future__ import annotations

from pydantic import Field

from rljob_api.api_model import ApiModel
from rljob_api.quantity import Bytes


class RecoverySpec(ApiModel):
    """Limits on automatic recovery. RLJob counts adjustments (changes of the memory plan) and restarts (with the same
    plan) separately."""

    max_adjustments: int = Field(default=6, ge=0, le=100)
    """Maximum changes of the memory plan before the job fails. Committed steps give changes back over time."""

    max_restarts: int = Field(default=3, ge=0, le=100)
    """Maximum restarts with the same plan before the job fails. RLJob restarts a job after failures that a change of
    the memory plan cannot prevent."""

    max_host_memory: Bytes | None = None
    """Maximum memory limit to which RLJob may raise a pod's container, as a Kubernetes quantity. Absent: RLJob never
    raises the limit in the pod template."""

    max_shared_memory: Bytes | None = None
    """Maximum size to which RLJob may raise /dev/shm, as a Kubernetes quantity. Data in /dev/shm counts as host memory
    of the pod that writes it. Absent: half the memory limit of the pod."""
