"""How a job fares: the status that the operator writes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rljob_api.api_model import ApiModel, Timestamp
from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import MAX_PLAN_CHANGES_KEPT, DiagnosisStatus, PlanChange, RemedyStatus, Role

__all__ = ["MAX_ATTEMPTS_KEPT", "DiagnosisStatus", "PlanChange", "RLJobStatus", "RemedyStatus", "Role"]

MAX_ATTEMPTS_KEPT = 20
"""The oldest attempts are dropped from the status; events and metrics have them."""


class Condition(ApiModel):
    """A metav1.Condition."""

    type: str = Field(max_length=316)
    """Suspended, Scheduled, Running, MemoryPressure, Recovering, Complete or Failed."""

    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""

    reason: str = Field(min_length=1, max_length=1024)
    """Why, as one CamelCase word."""

    message: str = Field(max_length=32768)
    """Why, as a sentence with the numbers, and what to do."""

    last_transition_time: Timestamp
    """When the status last changed."""

    observed_generation: int | None = Field(default=None, ge=0)
    """Generation of the spec that this is about."""


class JobMemory(ApiModel):
    """The fullest GPU of the job, in bytes."""

    peak_allocated_bytes: int = Field(ge=0)
    """Most memory in tensors at once."""

    peak_reserved_bytes: int = Field(ge=0)
    """Most memory that torch's allocator held at once."""

    outside_torch_bytes: int = Field(ge=0)
    """Memory in use that torch's allocator does not know of: contexts, NCCL, the engine's pool, other processes."""

    limit_bytes: int = Field(ge=0)
    """Memory that the device has."""

    headroom_bytes: int
    """What was left at the worst moment."""


class AttemptStatus(ApiModel):
    """One life of the pods' processes under one plan."""

    number: int = Field(ge=1)
    """Counts from 1."""

    plan_generation: int = Field(ge=1)
    """The plan it ran under."""

    start_time: Timestamp
    """When it began."""

    end_time: Timestamp | None = None
    """When its last pod was gone, or the job ended with it; absent while it runs."""

    from_step: int = Field(ge=1)
    """First step that it worked on."""

    to_step: int | None = Field(default=None, ge=0)
    """Last step that it committed."""

    exit_code: int | None = None
    """How it ended, as in the table of exit codes."""

    reason: str | None = Field(default=None, min_length=1, max_length=64)
    """Why it ended, or is being ended, as one CamelCase word; absent while it runs."""

    message: str | None = Field(default=None, max_length=1024)
    """Why it ended, as a sentence."""

    placement_retries: int = Field(default=0, ge=0)
    """Times that its pods were all released before, since only some of them could be placed."""

    pods_of_attempt: int | None = Field(default=None, ge=1)
    """The attempt whose pods it goes on in, restarted in place. Absent: it has pods of its own."""

    restarts_before: dict[str, int] = Field(default_factory=dict)
    """Restarts of each of those pods before it, by name."""

    diagnosis: DiagnosisStatus | None = None
    """Why it ended, where it was memory."""

    remedy: RemedyStatus | None = None
    """What was changed after it."""


class OutOfMemoryStatus(ApiModel):
    """The latest out-of-memory failure."""

    time: Timestamp
    """When it happened."""

    step: int = Field(ge=1)
    """The step it happened in."""

    diagnosis: DiagnosisStatus
    """The cause that was found."""


class RolePods(ApiModel):
    """The pods of one role. Topology Colocated: policy pods hold the engines too."""

    role: Role
    """controller, policy or rollout."""

    desired: int = Field(ge=0)
    """Pods that there should be."""

    ready: int = Field(ge=0)
    """Pods that are ready."""


class StatusDisplay(ApiModel):
    """What `kubectl get` prints; read the other fields by program, these by eye."""

    phase: str = Field(max_length=32)
    """Pending, Suspended, Running, Recovering, Complete or Failed."""

    step: str = Field(default="", max_length=32)
    """Committed and wanted steps: 37/60."""

    reward: str = Field(default="", max_length=32)
    """Mean reward of the last step."""

    peak: str = Field(default="", max_length=32)
    """Most memory reserved on a GPU."""

    headroom: str = Field(default="", max_length=32)
    """Memory left on the fullest GPU."""


class RLJobStatus(ApiModel):
    """How a job fares; written by the operator alone."""

    observed_generation: int | None = Field(default=None, ge=0)
    """Generation of the spec that this status is about."""

    conditions: list[Condition] = Field(
        default_factory=list,
        max_length=8,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """Suspended, Scheduled, Running, MemoryPressure, Recovering, Complete and Failed."""

    start_time: Timestamp | None = None
    """When the job first started."""

    completion_time: Timestamp | None = None
    """When the job ended, complete or failed."""

    step: int | None = Field(default=None, ge=0)
    """Steps committed."""

    steps: int | None = Field(default=None, ge=1)
    """Steps wanted."""

    reward: float | None = None
    """Mean reward of the last committed step."""

    adjustments: int = Field(default=0, ge=0)
    """Changes of the memory plan that count against recovery.maxAdjustments."""

    restarts: int = Field(default=0, ge=0)
    """Restarts under the same plan that count against recovery.maxRestarts."""

    memory: JobMemory | None = None
    """The fullest GPU of the job."""

    plan: MemoryPlan | None = None
    """The memory plan in force; written before anything acts on it."""

    plan_changes: list[PlanChange] = Field(
        default_factory=list,
        max_length=MAX_PLAN_CHANGES_KEPT,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["generation"]},
    )
    """The latest changes of the memory plan, oldest first."""

    attempts: list[AttemptStatus] = Field(
        default_factory=list,
        max_length=MAX_ATTEMPTS_KEPT,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["number"]},
    )
    """The latest attempts, oldest first."""

    last_out_of_memory: OutOfMemoryStatus | None = None
    """The latest out-of-memory failure."""

    pods: list[RolePods] = Field(
        default_factory=list,
        max_length=3,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["role"]},
    )
    """The pods of each role, while an attempt runs."""

    display: StatusDisplay | None = None
    """What `kubectl get` prints."""

    update_time: Timestamp | None = None
    """When this status was written."""
