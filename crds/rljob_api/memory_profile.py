"""MemoryProfile: the memory that jobs of one shape needed, and the changes of their memory plan that held."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob_api.api_model import ATOMIC, ApiModel, Count, PositiveCount, Timestamp, keyed_by
from rljob_api.memory_facts import MemoryFacts
from rljob_api.memory_plan import MemoryPlan
from rljob_api.metadata import Metadata
from rljob_api.plan_change import MAX_PLAN_CHANGES_KEPT, Phase, RemedyStatus, Role
from rljob_api.step_report import RankMemory
from rljob_api.topology import Topology


class ProfileChange(ApiModel):
    """A changed setting of the memory plan that held."""

    class_name: str = Field(alias="class", max_length=64)
    """Class of the failure that it answered, such as ActivationSpike."""

    role: Role
    """Role of the process that failed."""

    phase: Phase | None = None
    """Phase that failed. Absent: the roles were starting."""

    remedy: RemedyStatus
    """The setting, from its first value to the one that held, with the effect of its last change."""


ProfileChanges = Annotated[list[ProfileChange], Field(max_length=MAX_PLAN_CHANGES_KEPT)]


class StartingProfile(ApiModel):
    """The MemoryProfile from which a job's first memory plan was made."""

    name: str = Field(max_length=253)
    """Name of the profile."""

    namespace: str = Field(max_length=63)
    """Namespace of the profile."""

    facts: MemoryFacts | None = None
    """Model and machine of the profile. If the job has others, its trainer ignores the changes."""

    changes: ProfileChanges = Field(default_factory=list, json_schema_extra=ATOMIC)
    """Changed settings, which limit those of the first plan."""


class MemoryProfileSpec(ApiModel):
    """Jobs that the profile is about. All have the same settings that determine memory, listed here or not."""

    model: str = Field(max_length=1024)
    """Their spec.model.uri."""

    trainer: str = Field(default="", max_length=1024)
    """Image of their trainer. Empty: RLJob's own."""

    topology: Topology
    """Their spec.topology."""

    gpu: str = Field(default="", max_length=253)
    """Type of their GPUs, such as h100, or their product name. Empty: unknown, or no GPUs."""

    gpus: Count
    """Number of their GPUs, as in the manifest."""

    prompts_per_step: PositiveCount
    """Their spec.algorithm.promptsPerStep."""

    group_size: PositiveCount
    """Their spec.algorithm.groupSize."""

    max_prompt_tokens: PositiveCount
    """Their spec.algorithm.maxPromptTokens."""

    max_response_tokens: PositiveCount
    """Their spec.algorithm.maxResponseTokens."""


class ProfileDisplay(ApiModel):
    """Columns of `kubectl get`. They are for people; programs read the other fields."""

    peak: str = Field(default="", max_length=32)
    """Largest peak of reserved GPU memory of a process; without GPUs, of its host memory."""

    changes: str = Field(default="", max_length=512)
    """Changed settings."""


class MemoryProfileStatus(ApiModel):
    """Measurements of these jobs, and the memory plan that held."""

    facts: MemoryFacts | None = None
    """Shape of the model and size of the machine, as the trainer reported them. Absent: another trainer."""

    plan: MemoryPlan
    """Memory plan that held, without nodes that the job avoided."""

    changes: ProfileChanges = Field(default_factory=list, json_schema_extra=ATOMIC)
    """Settings of the plan that were changed from the first plan. The next such job starts with them."""

    peaks: Annotated[list[RankMemory], Field(max_length=3)] = Field(
        default_factory=list, json_schema_extra=keyed_by("role")
    )
    """Memory of the process of each role with the largest peak, in the last step that its job reported."""

    jobs: Count = 0
    """Completed jobs that were recorded. Under an unchanged plan, at most one a day is, unless it needed more memory
    than those before. Jobs that complete within the same second may count once."""

    last_job_uid: str = Field(default="", max_length=64)
    """uid of the last of them."""

    last_used_time: Timestamp
    """Time of the last record. A profile that was not used for 30 days is ignored, and later deleted."""

    display: ProfileDisplay = ProfileDisplay()
    """Columns of `kubectl get`."""


class MemoryProfile(ApiModel):
    """Memory that jobs of one shape needed, and the settings that held after out-of-memory failures. Only the operator
    writes it. The next job of the shape starts with these settings."""

    api_version: Literal["rljob.dev/v1alpha1"] = "rljob.dev/v1alpha1"
    """Version of this API."""

    kind: Literal["MemoryProfile"] = "MemoryProfile"
    """MemoryProfile."""

    metadata: Metadata
    """Metadata. The name ends with a digest of the settings that determine memory."""

    spec: MemoryProfileSpec
    """Jobs that the profile is about."""

    status: MemoryProfileStatus
    """Measurements of these jobs, and the memory plan that held."""
