"""The summary of a run: `summary.json`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from statistics import fmean
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from rljob_api.bounds import storable
from rljob_api.evaluation import EvaluationStatus
from rljob_api.exit_codes import ExitCode
from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import PlanChange
from rljob_client.run_directory.records import (
    PHASES,
    LedgerRecord,
    RestoreRecord,
    StepRecord,
    attempt_records,
    evaluation_records,
    plan_change_records,
    step_records,
)
from rljob_client.run_directory.reward_trend import Verdict, reward_trend
from rljob_memory.budget import Budget, Owner, Phase, budget, setup_of_facts

_GIB = 2**30
_STOPPED = {ExitCode.INTERRUPTED, ExitCode.TERMINATED}


class _SummaryPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    _storable = model_validator(mode="before")(storable)


class DurationStatistics(_SummaryPart):
    """Seconds over all committed steps."""

    sum: float

    mean: float
    """Per step."""


class PeakMemory(_SummaryPart):
    """The highest memory peak of a role."""

    gib: float

    counts: Literal["device", "host"]
    """Kind of memory. `device`: reserved by torch's allocator on a GPU. `host`: resident memory."""

    predicted_gib: float | None = None
    """The same by the memory budget of the last plan; null for host memory, and in runs of earlier versions."""


class Summary(_SummaryPart):
    """Contents of `summary.json`."""

    job: str
    status: Literal["Complete", "Stopped", "Failed"]
    exit_code: int

    exit_reason: str
    """Reason in one sentence."""

    steps: int
    """Committed steps."""

    total_steps: int
    attempts: int

    skipped_prompts: int
    """Prompts of the task that are longer than algorithm.maxPromptTokens, and are skipped."""

    reward_errors: int
    """Responses whose reward is 0 because the reward function failed (task.onRewardError: Zero)."""

    skipped_updates: int
    """Updates that were not applied because their gradient was not finite."""

    dropped_tokens: int
    """Response tokens that were left out of the loss because the engine's log-probability was not finite."""

    skipped_tokens: int
    """Response tokens that no update processed because their advantage is 0: their rewards equal those of their
    group."""

    steps_without_gradient: int
    """Steps in which the responses to each prompt had equal rewards."""

    empty_responses: int
    """Responses with no token but that of the end of the sequence."""

    truncated_ratio: float | None
    """Fraction of all responses that were cut at the token limit, 0 to 1; null without a step."""

    replayed_steps: int
    """Updates that were replayed from the journal, over all attempts."""

    first_reward: float | None
    """Mean of the mean rewards of the first `reward_window_steps` steps; null below two steps."""

    last_reward: float | None
    """The same of the last ones; null without a step."""

    reward_window_steps: int
    """Five, or half of the steps if there are fewer than ten; 0 without a step."""

    reward_trend: Verdict | None
    """`stayed` if the difference is within two standard errors; null below two steps."""

    evaluation: EvaluationStatus | None
    """The last and the best evaluation by `evaluation.bestMetric`; null without one."""

    evaluations: int
    evaluation_seconds: float
    """Over all evaluations. It counts for no step."""

    tokens: int
    """Prompt and response tokens of all committed steps."""

    tokens_per_second: float
    """Per second of the committed steps."""

    startup_seconds: float | None
    """Between the start of the last attempt that committed a step and its first step, including replayed
    updates; null without a step."""

    step_seconds: DurationStatistics | None
    """Wall time of steps: more than the sum of the phases."""

    seconds_by_phase: dict[str, DurationStatistics]

    predicted_seconds: dict[str, float]
    """Seconds of a step by phase, by the budget of the last plan, if all responses have the maximum length; empty on
    CPUs, and in runs of earlier versions."""

    peak_memory: dict[str, PeakMemory]
    """By role."""

    plan_changes: list[PlanChange]
    """Changes of the memory plan, oldest first."""

    def to_json(self) -> bytes:
        return self.model_dump_json(indent=2).encode() + b"\n"


def summarize(
    records: Sequence[LedgerRecord], *, job: str, total_steps: int, exit_code: ExitCode, exit_reason: str | None = None
) -> Summary:
    """The summary of a ledger's records. `exit_reason`: why the run ended; default: the meaning of the exit code."""
    steps = step_records(records)
    trend = reward_trend([step.reward for step in steps])
    seconds = [step.total_seconds for step in steps]
    tokens = sum(step.tokens for step in steps)
    attempts, evaluations = attempt_records(records), evaluation_records(records)
    predicted = _predicted(records)
    return Summary(
        job=job,
        status=_status(exit_code),
        exit_code=exit_code,
        # A path may have bytes that are not UTF-8, which JSON cannot contain.
        exit_reason=(exit_reason or exit_code.meaning).encode("utf-8", "backslashreplace").decode(),
        steps=len(steps),
        total_steps=total_steps,
        attempts=len(attempts),
        skipped_prompts=attempts[-1].skipped_prompts if attempts else 0,
        reward_errors=_total(steps, "reward_errors"),
        skipped_updates=_total(steps, "skipped_updates"),
        dropped_tokens=_total(steps, "dropped_tokens"),
        skipped_tokens=_total(steps, "skipped_tokens"),
        steps_without_gradient=sum(step.has_no_signal for step in steps),
        empty_responses=_total(steps, "empty_responses"),
        truncated_ratio=fmean(step.response.clipped_ratio for step in steps) if steps else None,
        replayed_steps=sum(record.replayed_steps for record in records if isinstance(record, RestoreRecord)),
        first_reward=trend.first if trend else None,
        last_reward=trend.last if trend else None,
        reward_window_steps=trend.window_steps if trend else 0,
        reward_trend=trend.verdict if trend else None,
        evaluation=evaluations[-1].status if evaluations else None,
        evaluations=len(evaluations),
        evaluation_seconds=sum(record.seconds for record in evaluations),
        tokens=tokens,
        tokens_per_second=tokens / sum(seconds) if seconds else 0.0,
        startup_seconds=_startup_seconds(records),
        step_seconds=DurationStatistics(sum=sum(seconds), mean=fmean(seconds)) if seconds else None,
        seconds_by_phase=_seconds_by_phase(steps),
        predicted_seconds=dict(predicted.seconds_by_phase) if predicted else {},
        peak_memory=_peak_memory(steps, predicted),
        plan_changes=[record.change for record in plan_change_records(records)],
    )


def _total(steps: Sequence[StepRecord], metric: str) -> int:
    return int(sum(step.metrics.get(metric, 0.0) for step in steps))


def _status(exit_code: ExitCode) -> Literal["Complete", "Stopped", "Failed"]:
    if exit_code == ExitCode.COMPLETE:
        return "Complete"
    return "Stopped" if exit_code in _STOPPED else "Failed"


def _startup_seconds(records: Sequence[LedgerRecord]) -> float | None:
    first_steps = {step.attempt: step for step in reversed(step_records(records))}
    started = [attempt for attempt in attempt_records(records) if attempt.attempt in first_steps]
    if not started:
        return None
    first = first_steps[started[-1].attempt]
    return first.committed_at - first.total_seconds - started[-1].started_at


def _seconds_by_phase(steps: Sequence[StepRecord]) -> dict[str, DurationStatistics]:
    """A step without a phase, such as a checkpoint, counts as 0 seconds in its mean."""
    sums = {phase: sum(step.seconds.get(phase, 0.0) for step in steps) for phase in PHASES}
    return {phase: DurationStatistics(sum=total, mean=total / len(steps)) for phase, total in sums.items() if steps}


def _predicted(records: Sequence[LedgerRecord]) -> Budget | None:
    """The budget of the last plan, on GPUs; None on CPUs, and for ledgers of earlier versions."""
    attempts, changes = attempt_records(records), plan_change_records(records)
    setup = setup_of_facts(attempts[-1].plan_facts) if attempts else None
    if setup is None or setup.hardware.device == "cpu":
        return None
    with suppress(ValidationError):
        plan = MemoryPlan.model_validate(attempts[-1].plan)
        if changes and changes[-1].plan.generation > plan.generation:
            plan = changes[-1].plan
        return budget(setup, plan)
    return None


_IN_BUDGET: dict[str, tuple[Owner, Phase]] = {"policy": ("policy", "update"), "rollout": ("engine", "rollout")}
"""Owner and phase of the predicted memory with which a role's peak is compared."""


def _peak_memory(steps: Sequence[StepRecord], predicted: Budget | None) -> dict[str, PeakMemory]:
    peaks: dict[str, PeakMemory] = {}
    for step in steps:
        for role, peak_bytes in step.peak_memory_bytes.items():
            gib = peak_bytes / _GIB
            if role not in peaks or gib > peaks[role].gib:
                peaks[role] = PeakMemory(
                    gib=gib, counts=step.memory_counts, predicted_gib=_predicted_gib(role, predicted)
                )
    return peaks


def _predicted_gib(role: str, predicted: Budget | None) -> float | None:
    if predicted is None or role not in _IN_BUDGET:
        return None
    owner, phase = _IN_BUDGET[role]
    return predicted.in_torch(owner, phase) / _GIB
