"""One change of the memory plan: what made it necessary, what was changed, and what that brought."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob_api.api_model import ApiModel, Timestamp

Role = Literal["controller", "policy", "rollout"]
Phase = Literal["rollout", "reward", "update", "sync", "checkpoint"]

RemedyLevel = Literal["Live", "RespawnRole", "RestartInPlace", "ReplacePods"]
"""What a change of the plan takes to come into force, the cheapest first: nothing (same processes), new processes of
one role, new containers in the same pods, new pods."""

MAX_PLAN_CHANGES_KEPT = 20
MAX_DIAGNOSES_KEPT = 3


class DiagnosisStatus(ApiModel):
    """The cause that was found for an out-of-memory failure."""

    class_name: str = Field(alias="class", max_length=64)
    """Class of the cause, such as Fragmentation or ActivationSpike."""

    confidence: float = Field(ge=0, le=1)
    """How sure the diagnosis is."""

    message: str = Field(max_length=2048)
    """The cause as a sentence, with the numbers behind it."""

    numbers: Annotated[dict[str, int], Field(max_length=32)] = Field(default_factory=dict)
    """The numbers behind it, by name: bytes and counts."""


class RemedyStatus(ApiModel):
    """One change of the memory plan, what it was to bring and what it brought."""

    setting: str = Field(max_length=64)
    """The setting of the plan that was changed."""

    before: str = Field(max_length=64)
    """Its value before."""

    after: str = Field(max_length=64)
    """Its value after."""

    expected_bytes: int | None = None
    """Memory that the change was to free."""

    observed_bytes: int | None = None
    """Memory that it freed, once that is known."""


class PlanChange(ApiModel):
    """One change of the memory plan. Whoever makes it writes it down before acting on it."""

    generation: int = Field(ge=2)
    """Generation of the plan that it led to."""

    time: Timestamp
    """When it was decided."""

    attempt: int = Field(ge=1)
    """The attempt whose failure it answers."""

    step: int = Field(ge=1)
    """The step that failed, or that was about to."""

    phase: Phase | None = None
    """The phase of the failure. Absent: the roles were starting."""

    role: Role
    """Role of the process that failed."""

    rank: int = Field(default=0, ge=0)
    """Number of the process within its role."""

    diagnosis: DiagnosisStatus
    """The cause that it answers."""

    remedy: RemedyStatus
    """What was changed."""

    level: RemedyLevel
    """What it took to come into force."""

    preventive: bool = False
    """Made before a failure, on an early warning."""

    seconds_to_recover: float | None = Field(default=None, ge=0)
    """From the failure until the failed phase was done; absent until then."""
