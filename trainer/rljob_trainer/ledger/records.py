"""The lines of `ledger.jsonl`. Each is one JSON object; `kind` says which."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from rljob_api.fault_injection import FaultClass, FaultPhase
from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import PlanChange
from rljob_api.step_report import Evidence

PHASES = ("rollout", "reward", "update", "sync", "checkpoint")
"""The phases of a step, in their order."""


def role_of(actor: str) -> str:
    """`policy` of `policy-0`."""
    return actor.partition("-")[0]


class _Record(BaseModel):
    # JSON has no NaN; a diverged loss must still be a valid line that other readers can parse.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class AttemptRecord(_Record):
    """One life of the job's processes. Its steps follow it.

    `started_at`: seconds since the epoch. `resumed_from`: the last committed step when it began, 0 at the first start.
    `plan`: the memory plan's values, its generation among them. `processes`: process id by actor name.
    """

    kind: Literal["attempt"] = "attempt"
    attempt: int = Field(ge=1)
    started_at: float
    resumed_from: int = Field(ge=0)
    versions: dict[str, str] = {}
    plan: dict[str, Any] = {}
    processes: dict[str, int] = {}


class RestoreRecord(_Record):
    """How the policy came to the state after a step: a checkpoint, and updates replayed on top.

    `checkpoint_step` is 0 where there was no checkpoint.
    """

    kind: Literal["restore"] = "restore"
    attempt: int = Field(ge=1)
    checkpoint_step: int = Field(ge=0)
    replayed_steps: int = Field(ge=0)


class ReadyRecord(_Record):
    """The attempt's roles are up, and work on a step. `seconds`: what each part of that took, from the attempt's start:
    reading (model and task), ray, processes, policy, engine, checkpoint, replay, sync."""

    kind: Literal["ready"] = "ready"
    attempt: int = Field(ge=1)
    seconds: dict[str, float]


class PlanChangeRecord(_Record):
    """One change of the memory plan, written before anything acts on it; and once more when the failed phase is done.

    Of two with the same generation the later one counts: it knows what the change brought. `plan`: as it is from then
    on. `evidence`: what it answers; absent for a change on an early warning. `seconds`: in the later one, what each
    part of the recovery took, as in `ReadyRecord`; empty where it took a new attempt, or nothing but trying again.
    """

    kind: Literal["plan_change"] = "plan_change"
    change: PlanChange
    plan: MemoryPlan
    evidence: Evidence | None = None
    seconds: dict[str, float] = {}


class FaultRecord(_Record):
    """One fault that was asked for and is given, written before it is: none is given once too often."""

    kind: Literal["fault"] = "fault"
    attempt: int = Field(ge=1)
    fault_class: FaultClass
    phase: FaultPhase
    step: int = Field(ge=1)
    rank: int = Field(ge=0)


class RewardStatistics(_Record):
    """Over all completions of the step; `std` is the population standard deviation (divisor n)."""

    mean: float
    std: float
    min: float
    max: float


class ResponseStatistics(_Record):
    """Tokens of the completions. `clipped_ratio`: the share of them that was cut at the limit, 0 to 1."""

    mean_tokens: float
    max_tokens: int
    clipped_ratio: float


class StepRecord(_Record):
    """One committed step.

    `seconds`: by phase. `total_seconds`: wall time of the step, time between phases included. `tokens`: prompt and
    response tokens that the policy learnt from. `metrics`: of the update (loss, grad_norm, …). `memory_bytes`: peak by
    actor (`policy-0`) and phase; `memory_counts` says of what: `device` is what torch's allocator reserved on a GPU,
    `host` is resident memory. `committed_at`: seconds since the epoch. `weights_version`: of what the engines now hold.
    """

    kind: Literal["step"] = "step"
    step: int = Field(ge=1)
    attempt: int = Field(ge=1)
    reward: RewardStatistics
    response: ResponseStatistics
    seconds: dict[str, float]
    total_seconds: float = Field(gt=0)
    tokens: int
    metrics: dict[str, float] = {}
    memory_bytes: dict[str, dict[str, int]] = {}
    memory_counts: Literal["device", "host"] = "host"
    weights_version: int = Field(ge=0)
    committed_at: float = Field(default_factory=time.time)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.total_seconds

    @property
    def peak_memory_bytes(self) -> dict[str, int]:
        """By role: the highest of its ranks and of all phases."""
        peaks: dict[str, int] = {}
        for actor, phases in self.memory_bytes.items():
            role = role_of(actor)
            peaks[role] = max([peaks.get(role, 0), *phases.values()])
        return peaks


LedgerRecord = AttemptRecord | RestoreRecord | ReadyRecord | PlanChangeRecord | FaultRecord | StepRecord
_RECORD: TypeAdapter[LedgerRecord] = TypeAdapter(Annotated[LedgerRecord, Field(discriminator="kind")])


def parse_record(line: bytes) -> LedgerRecord:
    """Raises pydantic's `ValidationError` on a line that is none of the records."""
    return _RECORD.validate_json(line)


def step_records(records: Sequence[LedgerRecord]) -> list[StepRecord]:
    return [record for record in records if isinstance(record, StepRecord)]


def attempt_records(records: Sequence[LedgerRecord]) -> list[AttemptRecord]:
    return [record for record in records if isinstance(record, AttemptRecord)]


def plan_change_records(records: Sequence[LedgerRecord]) -> list[PlanChangeRecord]:
    """The latest of each generation, in the order of the generations."""
    latest = {record.change.generation: record for record in records if isinstance(record, PlanChangeRecord)}
    return [latest[generation] for generation in sorted(latest)]


def fault_records(records: Sequence[LedgerRecord]) -> list[FaultRecord]:
    return [record for record in records if isinstance(record, FaultRecord)]
