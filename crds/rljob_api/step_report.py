"""StepReport: what a job's pods tell about the step they are in. One a job, written by the job, owned by its RLJob."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob_api.api_model import ApiModel, Timestamp
from rljob_api.memory_plan import MemoryPlan
from rljob_api.memory_profile import MemoryProfile
from rljob_api.metadata import Metadata
from rljob_api.plan_change import MAX_DIAGNOSES_KEPT, MAX_PLAN_CHANGES_KEPT, DiagnosisStatus, Phase, PlanChange, Role

MAX_RANKS_REPORTED = 256


class RankMemory(ApiModel):
    """Memory of one process and of its device, in bytes. 0 where there is no GPU."""

    role: Role
    """policy or rollout, or controller."""

    rank: int = Field(ge=0)
    """Number of the process within its role."""

    phase: Phase | None = None
    """Phase that the peaks are about. Absent: the whole step."""

    allocated_bytes: int = Field(default=0, ge=0)
    """Memory in tensors."""

    reserved_bytes: int = Field(default=0, ge=0)
    """Memory that torch's allocator holds."""

    peak_allocated_bytes: int = Field(default=0, ge=0)
    """Most memory in tensors at once."""

    peak_reserved_bytes: int = Field(default=0, ge=0)
    """Most memory that torch's allocator held at once."""

    device_free_bytes: int = Field(default=0, ge=0)
    """Free memory of the device, whoever uses the rest."""

    device_total_bytes: int = Field(default=0, ge=0)
    """Memory of the device."""

    outside_torch_bytes: int = Field(default=0, ge=0)
    """Memory of the device that the process holds beside torch's allocator: context, NCCL, libraries."""

    asleep_bytes: int = Field(default=0, ge=0)
    """Part of the reserved memory that a sleeping engine gave back to the device."""

    alloc_retries: int = Field(default=0, ge=0)
    """How often, since the process started, torch's allocator had to give its whole cache back to serve a request."""

    peak_rss_bytes: int = Field(default=0, ge=0)
    """Most host memory that the process held at once."""

    host_used_bytes: int = Field(default=0, ge=0)
    """Host memory of the process's container that cannot be dropped."""

    host_limit_bytes: int = Field(default=0, ge=0)
    """Limit of that memory, or the machine's memory where no limit is lower."""

    oom_kills: int = Field(default=0, ge=0)
    """Processes of the container that the kernel has killed for its memory."""

    shared_memory_used_bytes: int = Field(default=0, ge=0)
    """Memory in use in /dev/shm."""

    shared_memory_bytes: int = Field(default=0, ge=0)
    """Size of /dev/shm."""


class Evidence(ApiModel):
    """What was seen around an out-of-memory failure."""

    time: Timestamp
    """When it happened."""

    attempt: int = Field(ge=1)
    """The attempt that it ended."""

    role: Role
    """Role of the process."""

    rank: int = Field(ge=0)
    """Number of the process within its role."""

    step: int = Field(ge=1)
    """The step it happened in."""

    phase: Phase | None = None
    """The phase it happened in. Absent: the roles were starting."""

    micro_batch: int | None = Field(default=None, ge=0)
    """The micro-batch it happened in, within an update."""

    message: str = Field(max_length=4096)
    """The error as the process saw it."""

    memory: RankMemory | None = None
    """Memory of the process at that moment."""

    diagnoses: Annotated[list[DiagnosisStatus], Field(max_length=MAX_DIAGNOSES_KEPT)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """The causes that fit, the likeliest first, by whoever saw more than this: logs, samples over time."""


class MemoryPressure(ApiModel):
    """Memory will run out, if it goes on like this."""

    diagnosis: DiagnosisStatus
    """The class of the failure to come, and what says so."""

    role: Role
    """Role of the process."""

    rank: int = Field(default=0, ge=0)
    """Number of the process within its role."""

    steps_left: int = Field(ge=0)
    """Steps until then, at the rate seen."""


class PendingExit(ApiModel):
    """An attempt that cannot go on. Its processes wait, for a minute or so, for a changed plan to restart under."""

    exit_code: int = Field(ge=1, le=255)
    """What they end with otherwise, as in the table of exit codes."""

    message: str = Field(max_length=1024)
    """What happened and what to do, for people."""


class PhaseSeconds(ApiModel):
    """Seconds that each phase of a step took."""

    rollout: float = Field(default=0.0, ge=0)
    """Generating."""

    reward: float = Field(default=0.0, ge=0)
    """Scoring."""

    update: float = Field(default=0.0, ge=0)
    """Learning."""

    sync: float = Field(default=0.0, ge=0)
    """Bringing the weights to the engines."""

    checkpoint: float = Field(default=0.0, ge=0)
    """Waiting for a checkpoint."""


class StepReport(ApiModel):
    """What a job's pods tell about the step they are in."""

    api_version: Literal["rljob.dev/v1alpha1"] = "rljob.dev/v1alpha1"
    """Version of this API."""

    kind: Literal["StepReport"] = "StepReport"
    """StepReport."""

    metadata: Metadata
    """Name of the job, and its RLJob as owner."""

    attempt: int | None = Field(default=None, ge=1)
    """The attempt that reports."""

    plan_generation: int | None = Field(default=None, ge=1)
    """The memory plan that the attempt runs under."""

    plan: MemoryPlan | None = None
    """The plan itself. The first one is worked out by the trainer, which sees the model and the GPUs."""

    step: int | None = Field(default=None, ge=0)
    """Steps committed."""

    phase: Phase | None = None
    """The phase that the next step is in."""

    reward: float | None = None
    """Mean reward of the last committed step."""

    tokens_per_second: float | None = Field(default=None, ge=0)
    """Generated tokens of the last committed step by its whole duration."""

    seconds: PhaseSeconds | None = None
    """Duration of each phase of the last committed step."""

    memory: Annotated[list[RankMemory], Field(max_length=MAX_RANKS_REPORTED)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Memory of each process in the last committed step."""

    memory_profile: MemoryProfile | None = None
    """What bounds the memory plan, and says what a change of it frees."""

    plan_changes: Annotated[list[PlanChange], Field(max_length=MAX_PLAN_CHANGES_KEPT)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Changes of the memory plan that the trainer made by itself, oldest first."""

    memory_pressure: MemoryPressure | None = None
    """Absent: no sign that memory will run out."""

    last_evidence: Evidence | None = None
    """What was seen around the latest out-of-memory failure."""

    pending_exit: PendingExit | None = None
    """Why the attempt cannot go on. Absent: it goes on, or its processes have ended."""

    update_time: Timestamp | None = None
    """When this was written."""
