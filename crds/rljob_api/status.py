"""The status of a job, which the operator writes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rljob_api.api_model import ATOMIC, ApiModel, Count, PositiveCount, Timestamp, keyed_by
from rljob_api.evaluation import EvaluationStatus
from rljob_api.memory_plan import MemoryPlan
from rljob_api.memory_profile import StartingProfile
from rljob_api.plan_change import MAX_PLAN_CHANGES_KEPT, DiagnosisStatus, PlanChange, RemedyStatus, Role

__all__ = ["MAX_ATTEMPTS_KEPT", "DiagnosisStatus", "PlanChange", "RLJobStatus", "RemedyStatus", "Role"]

MAX_ATTEMPTS_KEPT = 20
"""Maximum attempts in the status; the operator drops the oldest. Events and metrics cover all of them."""


class Condition(ApiModel):
    """A condition of the job, as a metav1.Condition."""

    type: str = Field(max_length=316)
    """Suspended, Fits, Scheduled, Running, MemoryPressure, Degraded, Recovering, Complete, Failed, Ready or Stalled."""

    status: Literal["True", "False", "Unknown"]
    """Status of the condition."""

    reason: str = Field(min_length=1, max_length=1024)
    """Reason for the status, in CamelCase."""

    message: str = Field(max_length=32768)
    """Explanation of the status, with numbers and the required action."""

    last_transition_time: Timestamp
    """Time of the last change of the status."""

    observed_generation: Count | None = None
    """Generation of the spec that the condition is based on."""


class JobMemory(ApiModel):
    """Memory of the fullest GPU of the job, in bytes."""

    peak_allocated_bytes: Count
    """Peak memory in tensors."""

    peak_reserved_bytes: Count
    """Peak memory that torch's allocator reserved."""

    outside_torch_bytes: Count
    """Memory in use outside torch's allocator: CUDA contexts, NCCL, the engine's pool, other processes."""

    limit_bytes: Count
    """Total memory of the GPU."""

    headroom_bytes: int
    """Memory that was free at the peak."""


class AttemptStatus(ApiModel):
    """One run of the job's processes under one memory plan."""

    number: PositiveCount
    """Number of the attempt, from 1."""

    plan_generation: PositiveCount
    """Generation of its memory plan."""

    start_time: Timestamp
    """Time of its start."""

    end_time: Timestamp | None = None
    """Time at which its last pod was gone, or the job finished. Absent while it runs."""

    from_step: PositiveCount
    """First step of the attempt."""

    to_step: Count | None = None
    """Last committed step of the attempt."""

    exit_code: int | None = None
    """Exit code, as in the table of exit codes."""

    reason: str | None = Field(default=None, min_length=1, max_length=64)
    """Reason for its termination, in CamelCase. Absent while it runs."""

    message: str | None = Field(default=None, max_length=1024)
    """Explanation of its termination."""

    placement_retries: Count = 0
    """Number of times that all its pods were released because only some of them could be placed."""

    pods_of_attempt: PositiveCount | None = None
    """Attempt whose pods it reuses after a restart in place. Absent: it has its own pods."""

    restarts_before: dict[str, int] = Field(default_factory=dict, json_schema_extra={"x-kubernetes-map-type": "atomic"})
    """Container restarts of those pods before it, by pod name. Kept for the latest attempt only."""

    replacing_pods: list[str] = Field(default_factory=list, max_length=1024, json_schema_extra=ATOMIC)
    """Names of rollout pods that were lost and are being replaced, while the others generate."""

    pod_replacements: Count = 0
    """Number of rollout pods that were replaced in the attempt, or are being replaced."""

    diagnosis: DiagnosisStatus | None = None
    """Cause of its out-of-memory failure."""

    remedy: RemedyStatus | None = None
    """Change of the memory plan after it."""


class OutOfMemoryStatus(ApiModel):
    """An out-of-memory failure."""

    time: Timestamp
    """Time of the failure."""

    step: PositiveCount
    """Step of the failure."""

    diagnosis: DiagnosisStatus
    """Cause of the failure."""


class FailureStatus(ApiModel):
    """The spec of a job when it failed. A later change of it resumes the job."""

    generation: int = Field(ge=0)
    """Generation of the spec at the failure."""

    spec_digest: str = Field(max_length=64)
    """Digest of the fields of that spec whose change resumes the job."""


class RolePods(ApiModel):
    """Pods of one role. With topology Colocated, policy pods also run the engines."""

    role: Role
    """controller, policy or rollout."""

    desired: Count
    """Number of pods that the role should have."""

    ready: Count
    """Number of ready pods."""


class StatusDisplay(ApiModel):
    """Columns of `kubectl get`. They are for people; programs read the other fields."""

    phase: str = Field(max_length=32)
    """Pending, Invalid, Suspended, Running, Recovering, Complete or Failed."""

    step: str = Field(default="", max_length=32)
    """Committed steps and all steps, such as 37/60."""

    reward: str = Field(default="", max_length=32)
    """Mean reward of the last committed step."""

    evaluation: str = Field(default="", max_length=64)
    """Score and step of the latest evaluation, and of the best one if it is another."""

    peak: str = Field(default="", max_length=32)
    """Peak reserved memory of the fullest GPU."""

    headroom: str = Field(default="", max_length=32)
    """Memory that was free on the fullest GPU at its peak."""


class RLJobStatus(ApiModel):
    """Status of the job. Only the operator writes it."""

    observed_generation: Count | None = None
    """Generation of the spec that the status is based on."""

    conditions: list[Condition] = Field(default_factory=list, max_length=16, json_schema_extra=keyed_by("type"))
    """Conditions Suspended, Fits, Scheduled, Running, MemoryPressure, Degraded, Recovering, Complete, Failed, Ready and
    Stalled."""

    start_time: Timestamp | None = None
    """Time at which the job first started. With spec.queueName: at which its pods were first placed."""

    completion_time: Timestamp | None = None
    """Time at which the job completed or failed."""

    step: Count | None = None
    """Number of committed steps."""

    steps: PositiveCount | None = None
    """Number of steps in spec.algorithm.steps."""

    reward: float | None = None
    """Mean reward of the last committed step."""

    evaluation: EvaluationStatus | None = None
    """Results of the evaluations. Absent: there is none yet."""

    adjustments: Count = 0
    """Number of changes of the memory plan that count against recovery.maxAdjustments."""

    restarts: Count = 0
    """Number of restarts with the same plan that count against recovery.maxRestarts."""

    failure: FailureStatus | None = None
    """The spec of a failed job at its failure. Absent unless the job has failed."""

    resumed_from_attempt: int | None = Field(default=None, ge=1)
    """First attempt after the job was last resumed from a failure. Adjustments, restarts and delays count from it."""

    memory: JobMemory | None = None
    """Memory of the fullest GPU of the job."""

    plan: MemoryPlan | None = None
    """Current memory plan. It is recorded before it is applied."""

    memory_profile: StartingProfile | None = None
    """MemoryProfile that the first memory plan was made from. Absent: it was computed from the model and the machine
    alone."""

    plan_changes: list[PlanChange] = Field(
        default_factory=list, max_length=MAX_PLAN_CHANGES_KEPT, json_schema_extra=keyed_by("generation")
    )
    """Latest changes of the memory plan, oldest first."""

    attempts: list[AttemptStatus] = Field(
        default_factory=list, max_length=MAX_ATTEMPTS_KEPT, json_schema_extra=keyed_by("number")
    )
    """Latest attempts, oldest first."""

    last_out_of_memory: OutOfMemoryStatus | None = None
    """Latest out-of-memory failure."""

    pods: list[RolePods] = Field(default_factory=list, max_length=3, json_schema_extra=keyed_by("role"))
    """Pods of each role, while an attempt runs."""

    display: StatusDisplay | None = None
    """Columns of `kubectl get`."""

    update_time: Timestamp | None = None
    """Time of the last update of the status."""
