"""How a run went, in the few numbers that people ask for first: `summary.json`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Literal

from pydantic import BaseModel, ConfigDict

from rljob_api.exit_codes import ExitCode
from rljob_api.plan_change import PlanChange
from rljob_trainer.ledger.records import (
    PHASES,
    LedgerRecord,
    RestoreRecord,
    StepRecord,
    attempt_records,
    plan_change_records,
    step_records,
)

REWARD_WINDOW_STEPS = 5
_GIB = 2**30
_STOPPED = {ExitCode.INTERRUPTED, ExitCode.TERMINATED}


class _SummaryPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class PhaseSeconds(_SummaryPart):
    """`sum` over all committed steps; `mean` a step."""

    sum: float
    mean: float


class PeakMemory(_SummaryPart):
    """The highest peak of a role. `device`: what torch's allocator reserved on a GPU; `host`: resident memory."""

    gib: float
    counts: Literal["device", "host"]


class Summary(_SummaryPart):
    """`first_reward`, `last_reward`: means of the first and the last five steps' mean rewards; null without a step.

    `tokens`: prompt and response tokens of all committed steps; `tokens_per_second`: a second of the step loop.
    `step_seconds`: whole steps, so more than the sum of the phases. `startup_seconds`: from the start of the last
    attempt that committed a step to the beginning of its first step, replayed updates included; null without a step.
    `replayed_steps`: updates done again from the journal, over all attempts. `plan_changes`: of the memory plan, oldest
    first.
    """

    job: str
    status: Literal["Complete", "Stopped", "Failed"]
    exit_code: int
    exit_reason: str
    steps: int
    total_steps: int
    attempts: int
    replayed_steps: int
    first_reward: float | None
    last_reward: float | None
    tokens: int
    tokens_per_second: float
    startup_seconds: float | None
    step_seconds: PhaseSeconds | None
    seconds_by_phase: dict[str, PhaseSeconds]
    peak_memory: dict[str, PeakMemory]
    plan_changes: list[PlanChange]

    def to_json(self) -> bytes:
        return self.model_dump_json(indent=2).encode() + b"\n"


def summarize(
    records: Sequence[LedgerRecord], *, job: str, total_steps: int, exit_code: ExitCode, exit_reason: str | None = None
) -> Summary:
    """The summary of a ledger's records. `exit_reason`: one sentence; by default what the exit code means."""
    steps = step_records(records)
    rewards = [step.reward.mean for step in steps]
    seconds = [step.total_seconds for step in steps]
    tokens = sum(step.tokens for step in steps)
    return Summary(
        job=job,
        status=_status(exit_code),
        exit_code=exit_code,
        exit_reason=exit_reason or exit_code.meaning,
        steps=len(steps),
        total_steps=total_steps,
        attempts=len(attempt_records(records)),
        replayed_steps=sum(record.replayed_steps for record in records if isinstance(record, RestoreRecord)),
        first_reward=fmean(rewards[:REWARD_WINDOW_STEPS]) if rewards else None,
        last_reward=fmean(rewards[-REWARD_WINDOW_STEPS:]) if rewards else None,
        tokens=tokens,
        tokens_per_second=tokens / sum(seconds) if seconds else 0.0,
        startup_seconds=_startup_seconds(records),
        step_seconds=PhaseSeconds(sum=sum(seconds), mean=fmean(seconds)) if seconds else None,
        seconds_by_phase=_seconds_by_phase(steps),
        peak_memory=_peak_memory(steps),
        plan_changes=[record.change for record in plan_change_records(records)],
    )


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


def _seconds_by_phase(steps: Sequence[StepRecord]) -> dict[str, PhaseSeconds]:
    """A phase that most steps do without (a checkpoint) counts 0 in the mean for those."""
    sums = {phase: sum(step.seconds.get(phase, 0.0) for step in steps) for phase in PHASES}
    return {phase: PhaseSeconds(sum=total, mean=total / len(steps)) for phase, total in sums.items() if steps}


def _peak_memory(steps: Sequence[StepRecord]) -> dict[str, PeakMemory]:
    peaks: dict[str, PeakMemory] = {}
    for step in steps:
        for role, peak_bytes in step.peak_memory_bytes.items():
            gib = peak_bytes / _GIB
            if role not in peaks or gib > peaks[role].gib:
                peaks[role] = PeakMemory(gib=gib, counts=step.memory_counts)
    return peaks
