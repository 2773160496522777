"""The records of `ledger.jsonl`. Each line is one JSON object; `kind` is its type."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from rljob_api.bounds import storable
from rljob_api.evaluation import EvaluationScore, EvaluationStatus
from rljob_api.fault_injection import FaultClass, FaultPhase
from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import PlanChange
from rljob_api.step_report import Evidence

PHASES = ("rollout", "reward", "update", "sync", "checkpoint")
"""The phases of a step, in order."""


def role_of(actor: str) -> str:
    """`policy` of `policy-0`."""
    return actor.partition("-")[0]


class _Record(BaseModel):
    # JSON has no NaN, but a line with a diverged loss must remain valid for other readers.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    _storable = model_validator(mode="before")(storable)


class AttemptRecord(_Record):
    """The start of an attempt. The records of its steps follow."""

    kind: Literal["attempt"] = "attempt"
    attempt: int = Field(ge=1)

    started_at: float
    """Seconds since the epoch."""

    resumed_from: int = Field(ge=0)
    """The last committed step at that time; 0: none."""

    versions: dict[str, str] = {}
    """Version by package."""

    plan: dict[str, Any] = {}
    """The values of the memory plan, including its generation."""

    processes: dict[str, int] = {}
    """Process id by actor name."""

    plan_facts: dict[str, Any] = {}
    """Machine, model and work that the plan was computed for; empty in ledgers of earlier versions."""

    inputs: dict[str, dict[str, Any]] = {}
    """Digests of data, reward code and model, as in `.identity.json`."""

    skipped_prompts: int = Field(default=0, ge=0)
    """Prompts of the task that are longer than the limit, and are skipped."""


class RestoreRecord(_Record):
    """A restore of the policy: a checkpoint, and updates that were replayed after it."""

    kind: Literal["restore"] = "restore"
    attempt: int = Field(ge=1)

    checkpoint_step: int = Field(ge=0)
    """Step of the checkpoint; 0: there was none."""

    replayed_steps: int = Field(ge=0)


class ReadyRecord(_Record):
    """The attempt's roles are up and work on a step. A later record of the attempt is of a role that started again."""

    kind: Literal["ready"] = "ready"
    attempt: int = Field(ge=1)

    seconds: dict[str, float]
    """Duration of each part of the start-up: reading (model and task), ray, processes, policy, engine, checkpoint,
    replay, sync."""


class PlanChangeRecord(_Record):
    """A change of the memory plan. Written before it takes effect, and again when the failed phase has completed.

    The later record of a generation replaces the earlier one: it contains the observed effect.
    """

    kind: Literal["plan_change"] = "plan_change"
    change: PlanChange

    plan: MemoryPlan
    """The changed plan."""

    evidence: Evidence | None = None
    """Evidence of the failure that the change responds to; None for a preventive change."""

    seconds: dict[str, float] = {}
    """In the later record, the duration of each part of the recovery, as in `ReadyRecord`. Empty if the recovery took a
    new attempt, or only a retry."""


class FaultRecord(_Record):
    """An injected fault. Written before the injection, so that none is injected too often."""

    kind: Literal["fault"] = "fault"
    attempt: int = Field(ge=1)
    fault_class: FaultClass
    phase: FaultPhase
    step: int = Field(ge=1)
    rank: int = Field(ge=0)


class RewardStatistics(_Record):
    """Rewards over all completions of the step."""

    mean: float

    std: float
    """Population standard deviation (divisor n)."""

    min: float
    max: float


class ResponseStatistics(_Record):
    """Lengths of the completions of the step, in tokens."""

    mean_tokens: float
    max_tokens: int

    clipped_ratio: float
    """Fraction of the completions that were cut at the token limit, 0 to 1."""


class StepRecord(_Record):
    """A committed step."""

    kind: Literal["step"] = "step"
    step: int = Field(ge=1)
    attempt: int = Field(ge=1)
    reward: RewardStatistics
    response: ResponseStatistics

    seconds: dict[str, float]
    """Seconds by phase."""

    total_seconds: float = Field(gt=0)
    """Wall time of the step, including the time between phases."""

    tokens: int
    """Prompt and response tokens that the policy processed."""

    metrics: dict[str, float] = {}
    """Metrics of the update: see `UpdateResult`."""

    prompts_drawn: int = Field(default=0, ge=0)
    """With dynamic sampling: prompts of the job that this and all earlier steps have generated responses to, and will
    not use again. The next step begins with the one after them."""

    memory_bytes: dict[str, dict[str, int]] = {}
    """Peak memory by actor (`policy-0`) and phase."""

    memory_counts: Literal["device", "host"] = "host"
    """Kind of memory. `device`: reserved by torch's allocator on a GPU. `host`: resident memory."""

    weights_version: int = Field(ge=0)
    """Version of the weights in the engines after the step."""

    committed_at: float = Field(default_factory=time.time)
    """Seconds since the epoch."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.total_seconds

    @property
    def has_no_signal(self) -> bool:
        """True if each group has equal rewards, and therefore no advantage."""
        return self.metrics.get("uniform_groups", 0.0) >= 1.0

    @property
    def peak_memory_bytes(self) -> dict[str, int]:
        """Highest peak of a role's ranks in any phase, by role."""
        peaks: dict[str, int] = {}
        for actor, phases in self.memory_bytes.items():
            role = role_of(actor)
            peaks[role] = max([peaks.get(role, 0), *phases.values()])
        return peaks


class EvaluationRecord(_Record):
    """An evaluation of the policy on held-out prompts."""

    kind: Literal["evaluation"] = "evaluation"
    attempt: int = Field(ge=1)

    step: int = Field(ge=0)
    """The last committed step before the evaluation; 0: the initial model."""

    prompts: int = Field(ge=1)
    """Prompts that were evaluated."""

    samples_per_prompt: int = Field(ge=1)

    metrics: dict[str, float]
    """By name, without a prefix: `reward_mean`, `avg@8`, `pass@1`, `response_mean_tokens`, …"""

    seconds: float = Field(ge=0)

    best: EvaluationScore | None = None
    """The best evaluation so far, by `evaluation.bestMetric`."""

    evaluated_at: float = Field(default_factory=time.time)
    """Seconds since the epoch."""

    @property
    def status(self) -> EvaluationStatus | None:
        """This evaluation and the best one; None in a record without the best one."""
        if (best := self.best) is None:
            return None
        last = EvaluationScore(step=self.step, metric=best.metric, score=self.metrics[best.metric])
        return EvaluationStatus(last=last, best=best)


LedgerRecord = (
    AttemptRecord | RestoreRecord | ReadyRecord | PlanChangeRecord | FaultRecord | StepRecord | EvaluationRecord
)
_RECORD: TypeAdapter[LedgerRecord] = TypeAdapter(Annotated[LedgerRecord, Field(discriminator="kind")])


def parse_record(line: bytes) -> LedgerRecord:
    """Parse a line. Raises pydantic's `ValidationError` if it is not a valid record."""
    return _RECORD.validate_json(line)


def step_records(records: Sequence[LedgerRecord]) -> list[StepRecord]:
    return [record for record in records if isinstance(record, StepRecord)]


def attempt_records(records: Sequence[LedgerRecord]) -> list[AttemptRecord]:
    return [record for record in records if isinstance(record, AttemptRecord)]


def plan_change_records(records: Sequence[LedgerRecord]) -> list[PlanChangeRecord]:
    """The latest record of each generation, by generation."""
    latest = {record.change.generation: record for record in records if isinstance(record, PlanChangeRecord)}
    return [latest[generation] for generation in sorted(latest)]


def evaluation_records(records: Sequence[LedgerRecord]) -> list[EvaluationRecord]:
    """The latest record of each step, by step."""
    latest = {record.step: record for record in records if isinstance(record, EvaluationRecord)}
    return [latest[step] for step in sorted(latest)]


def fault_records(records: Sequence[LedgerRecord]) -> list[FaultRecord]:
    return [record for record in records if isinstance(record, FaultRecord)]
