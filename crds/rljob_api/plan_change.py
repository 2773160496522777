"""A change of the memory plan: its cause, the changed setting and the effect."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from rljob_api.api_model import MAX_INTEGER, ApiModel, Count, PositiveCount, Rule, Seconds, Timestamp

Role = Literal["controller", "policy", "rollout"]
Phase = Literal["rollout", "reward", "update", "sync", "checkpoint"]

RemedyLevel = Literal["Live", "RespawnRole", "RestartInPlace", "ReplacePods"]
"""Cost of applying a change, cheapest first: none (same processes), new processes of one role, new containers in the
same pods, new pods."""

MAX_PLAN_CHANGES_KEPT = 20
MAX_DIAGNOSES_KEPT = 3
MAX_NUMBER_NAME_LENGTH = 64


def _clipped(number: object) -> object:
    if isinstance(number, int) and not isinstance(number, bool):
        return max(-MAX_INTEGER, min(number, MAX_INTEGER))
    return number


CalculatedCount = Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER), BeforeValidator(_clipped)]
"""A size or count that is calculated from reported ones; clipped to its bounds."""


class DiagnosisStatus(ApiModel):
    """Cause of an out-of-memory failure."""

    class_name: str = Field(alias="class", max_length=64)
    """Class of the cause, such as Fragmentation or ActivationSpike."""

    confidence: float = Field(ge=0, le=1)
    """Confidence in the diagnosis, from 0 to 1."""

    message: str = Field(max_length=2048)
    """Explanation of the cause, with its numbers."""

    numbers: Annotated[dict[str, CalculatedCount], Field(max_length=32)] = Field(
        default_factory=dict, json_schema_extra={"x-kubernetes-map-type": "atomic"}
    )
    """Numbers that support the diagnosis, by name. Names that end in _bytes are bytes, the others are counts."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"!has(self.numbers) || self.numbers.all(name, size(name) <= {MAX_NUMBER_NAME_LENGTH})",
            holds=lambda diagnosis: all(len(name) <= MAX_NUMBER_NAME_LENGTH for name in diagnosis.numbers),
            field="numbers",
            message=f"names of numbers have at most {MAX_NUMBER_NAME_LENGTH} characters: shorten them",
        ),
    )


class RemedyStatus(ApiModel):
    """A changed setting of the memory plan, with its expected and its observed effect."""

    setting: str = Field(max_length=64)
    """Changed setting, spelled as in spec.memory; processes, engineProcesses or policyProcesses if all processes, or
    those of the engines or of the policy, were only restarted."""

    before: str = Field(max_length=64)
    """Value before the change, as the manifest writes it; default if it was not set."""

    after: str = Field(max_length=64)
    """Value after the change, as the manifest writes it."""

    expected_bytes: CalculatedCount | None = None
    """Memory that the change was expected to free, or to add to a limit, in bytes."""

    observed_bytes: CalculatedCount | None = None
    """Memory that the change freed, in bytes. Absent until it is known."""


class PlanChange(ApiModel):
    """A change of the memory plan. It is recorded before it is applied."""

    generation: PositiveCount = Field(ge=2)
    """Generation of the changed plan."""

    time: Timestamp
    """Time of the decision."""

    attempt: PositiveCount
    """Attempt that failed."""

    step: PositiveCount
    """Step that failed, or that was projected to fail."""

    phase: Phase | None = None
    """Phase that failed. Absent: the roles were starting."""

    role: Role
    """Role of the failed process."""

    rank: Count = 0
    """Number of the process within its role, from 0."""

    diagnosis: DiagnosisStatus
    """Cause of the failure."""

    remedy: RemedyStatus
    """The change and its effect."""

    level: RemedyLevel
    """Cost of applying the change. Live: none. RespawnRole: new processes of one role. RestartInPlace: new containers
    in the same pods. ReplacePods: new pods."""

    preventive: bool = False
    """True if the change was made on an early warning, before a failure."""

    seconds_to_recover: Seconds | None = None
    """Seconds from the failure until the failed phase was completed. Absent until then."""
