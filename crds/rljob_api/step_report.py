"""StepReport: the progress that a job's pods report. There is one per job, written by the job and owned by its
RLJob."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rljob_api.api_model import ATOMIC, ApiModel, Count, PositiveCount, Seconds, Timestamp
from rljob_api.evaluation import EvaluationStatus
from rljob_api.memory_facts import MemoryFacts
from rljob_api.memory_failure import MemoryFailure
from rljob_api.memory_plan import MemoryPlan
from rljob_api.metadata import Metadata
from rljob_api.plan_change import MAX_DIAGNOSES_KEPT, MAX_PLAN_CHANGES_KEPT, DiagnosisStatus, Phase, PlanChange, Role

MAX_RANKS_REPORTED = 256
MAX_WARNING_LENGTH = 1024


class RankMemory(ApiModel):
    """Memory of one process and of its GPU, in bytes. GPU numbers are 0 on a CPU."""

    role: Role
    """Role of the process: controller, policy or rollout."""

    rank: Count
    """Number of the process within its role, from 0."""

    phase: Phase | None = None
    """Phase of the peaks. Absent: the whole step."""

    allocated_bytes: Count = 0
    """Memory in tensors."""

    reserved_bytes: Count = 0
    """Memory that torch's allocator has reserved."""

    peak_allocated_bytes: Count = 0
    """Peak memory in tensors."""

    peak_reserved_bytes: Count = 0
    """Peak memory that torch's allocator reserved."""

    device_free_bytes: Count = 0
    """Free memory of the GPU, counting all processes."""

    device_total_bytes: Count = 0
    """Total memory of the GPU."""

    outside_torch_bytes: Count = 0
    """GPU memory of the process outside torch's allocator: CUDA context, NCCL, libraries."""

    asleep_bytes: Count = 0
    """Part of the reserved memory that a sleeping engine has released to the GPU."""

    alloc_retries: Count = 0
    """Number of times since the start of the process that torch's allocator had to release its whole cache to serve a
    request."""

    peak_rss_bytes: Count = 0
    """Peak host memory of the process."""

    host_used_bytes: Count = 0
    """Host memory in use in the process's container, without memory that the kernel can reclaim."""

    host_limit_bytes: Count = 0
    """Memory limit of the container, or the machine's memory if no limit is lower."""

    oom_kills: Count = 0
    """Number of processes of the container that the kernel's out-of-memory killer has killed."""

    shared_memory_used_bytes: Count = 0
    """Memory in use in /dev/shm."""

    shared_memory_bytes: Count = 0
    """Size of /dev/shm."""


class Evidence(ApiModel):
    """Observations about an out-of-memory failure."""

    time: Timestamp
    """Time of the failure."""

    attempt: PositiveCount
    """Attempt that failed."""

    role: Role
    """Role of the failed process."""

    rank: Count
    """Number of the process within its role, from 0."""

    step: PositiveCount
    """Step of the failure."""

    phase: Phase | None = None
    """Phase of the failure. Absent: the roles were starting."""

    micro_batch: Count | None = None
    """Micro-batch of the failure, within an update."""

    message: str = Field(max_length=4096)
    """Error message of the process."""

    memory: RankMemory | None = None
    """Memory of the process at the time of the failure."""

    failure: MemoryFailure | None = None
    """Account of the failure by its process. Absent: the process could give none."""

    diagnoses: list[DiagnosisStatus] = Field(
        default_factory=list, max_length=MAX_DIAGNOSES_KEPT, json_schema_extra=ATOMIC
    )
    """Possible causes, likeliest first. The trainer diagnoses them from its logs and from memory samples over time."""


class MemoryPressure(ApiModel):
    """Projection that memory will run out."""

    diagnosis: DiagnosisStatus
    """Class of the projected failure, and its explanation."""

    role: Role
    """Role of the process."""

    rank: Count = 0
    """Number of the process within its role, from 0."""

    steps_left: Count
    """Steps until the projected failure, at the observed rate."""


TrainingWarningReason = Literal["NumbersNotFinite", "ResponsesEmpty", "RewardsEqual", "ResponsesTruncated"]


class TrainingWarning(ApiModel):
    """Problem of the last committed step: it trained on nothing, or lost a part of its work."""

    reason: TrainingWarningReason
    """NumbersNotFinite, ResponsesEmpty, RewardsEqual or ResponsesTruncated. Reason of the condition Degraded."""

    message: str = Field(max_length=MAX_WARNING_LENGTH)
    """Explanation of the problem, and what to do."""


class PendingExit(ApiModel):
    """Failure of an attempt whose processes are about to exit. They wait for about a minute, so that the operator can
    restart them in place with a changed memory plan."""

    exit_code: int = Field(ge=1, le=255)
    """Exit code of the processes if they are not restarted in place, as in the table of exit codes."""

    message: str = Field(max_length=1024)
    """Explanation of the failure, and what to do."""


class ExitDecision(ApiModel):
    """Decision of the operator about a pending exit."""

    attempt: PositiveCount
    """Attempt whose processes wait for the decision."""

    next_attempt: PositiveCount | None = None
    """Attempt for which the containers are restarted in place. Absent: the processes exit."""

    plan_generation: PositiveCount | None = None
    """Generation of the memory plan of that attempt."""


class PhaseSeconds(ApiModel):
    """Duration of each phase of a step, in seconds."""

    rollout: Seconds = 0.0
    """Generating responses."""

    reward: Seconds = 0.0
    """Scoring responses."""

    update: Seconds = 0.0
    """Updating the policy."""

    sync: Seconds = 0.0
    """Sending weights to the engines."""

    checkpoint: Seconds = 0.0
    """Waiting for a checkpoint to be saved."""


class StepReportStatus(ApiModel):
    """Progress of a job, as its controller pod reports it. The operator writes only `decision`."""

    attempt: PositiveCount | None = None
    """Attempt that reports."""

    plan_generation: PositiveCount | None = None
    """Generation of the attempt's memory plan."""

    plan: MemoryPlan | None = None
    """Memory plan of the attempt. The trainer computes the first plan, because it knows the model and the GPUs."""

    step: Count | None = None
    """Number of committed steps."""

    phase: Phase | None = None
    """Phase of the current step, the one after the last committed step."""

    reward: float | None = None
    """Mean reward of the last committed step."""

    evaluation: EvaluationStatus | None = None
    """Results of the evaluations. Absent: there is none yet."""

    tokens_per_second: float | None = Field(default=None, ge=0, le=1e15)
    """Generated tokens of the last committed step, divided by its whole duration."""

    seconds: PhaseSeconds | None = None
    """Duration of each phase of the last committed step, in seconds."""

    memory: list[RankMemory] = Field(default_factory=list, max_length=MAX_RANKS_REPORTED, json_schema_extra=ATOMIC)
    """Memory of each process in the last committed step."""

    memory_facts: MemoryFacts | None = None
    """Shape of the model and size of the machine, from which the memory budget follows."""

    plan_changes: list[PlanChange] = Field(
        default_factory=list, max_length=MAX_PLAN_CHANGES_KEPT, json_schema_extra=ATOMIC
    )
    """Changes of the memory plan that the trainer made without the operator, oldest first."""

    memory_pressure: MemoryPressure | None = None
    """Projection that memory will run out. Absent: no failure is projected."""

    training_warning: TrainingWarning | None = None
    """Gravest problem of the last committed step. Absent: it has none."""

    last_evidence: Evidence | None = None
    """Observations about the latest out-of-memory failure."""

    pending_exit: PendingExit | None = None
    """Failure of the attempt whose processes are about to exit. Absent: the attempt continues, or its processes have
    exited."""

    decision: ExitDecision | None = None
    """Decision of the operator about `pendingExit`."""

    update_time: Timestamp | None = None
    """Time of the report."""


class StepReport(ApiModel):
    """Progress that a job's pods report. The operator creates the object; the pods may only write its status."""

    api_version: Literal["rljob.dev/v1alpha1"] = "rljob.dev/v1alpha1"
    """Version of this API."""

    kind: Literal["StepReport"] = "StepReport"
    """StepReport."""

    metadata: Metadata
    """Metadata. The name is that of the job, and the owner is its RLJob."""

    status: StepReportStatus | None = None
    """Progress of the job. Absent until the controller pod reports for the first time."""
