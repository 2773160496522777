"""Rows that record the runs of jobs that run out of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from rljob_api.exit_codes import ExitCode
from rljob_client.run_directory.records import (
    LedgerRecord,
    PlanChangeRecord,
    ReadyRecord,
    plan_change_records,
    step_records,
)

GIB = 1 << 30
OUT_OF_MEMORY = (ExitCode.DEVICE_OUT_OF_MEMORY, ExitCode.HOST_OUT_OF_MEMORY, ExitCode.SHARED_MEMORY_EXHAUSTED)

Arm = Literal["calm", "without", "with"]
"""calm: with a plan that has enough memory. without, with: with a plan that has not, without and with recovery."""


@dataclass(frozen=True, slots=True)
class FailingJob:
    """A job of bench/programs/failing_jobs."""

    name: str
    failure_class: str
    plan: Mapping[str, Any]
    """The complete memory plan, in the spelling of the manifest."""
    faults: Sequence[Mapping[str, Any]] = ()
    """Entries of `spec.faultInjection.faults`."""
    ballast_gib: int = 0
    """GPU memory that another process holds during the run."""
    recovery: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `spec.recovery` that differ from the manifest."""
    ends: Literal["Complete", "GiveUp"] = "Complete"
    """GiveUp: nothing in the plan can help, and the job has to fail with an explanation."""


@dataclass(frozen=True, slots=True)
class Run:
    """Result of one `rljob run`."""

    exit_code: int | None
    """None if the run exceeded its time limit and was killed."""
    seconds: float
    summary: Mapping[str, Any] = field(default_factory=dict)
    ledger: Sequence[LedgerRecord] = ()

    @property
    def rewards(self) -> list[float]:
        return [record.reward.mean for record in step_records(self.ledger)]

    @property
    def gradient_norms(self) -> list[float]:
        return [record.metrics["grad_norm"] for record in step_records(self.ledger) if "grad_norm" in record.metrics]

    @property
    def plan_changes(self) -> list[PlanChangeRecord]:
        return plan_change_records(self.ledger)

    @property
    def start(self) -> dict[str, float]:
        """Seconds of the first attempt's start, by part; empty if it did not start."""
        starts = (record.seconds for record in self.ledger if isinstance(record, ReadyRecord))
        return _rounded(next(starts, {}))


def row_of(done: Run) -> dict[str, Any]:
    """Fields that every run has."""
    return {
        "exit_code": done.exit_code,
        "steps": len(done.rewards),
        "seconds": done.seconds,
        "start": done.start,
        "rewards": done.rewards,
        "gradient_norms": done.gradient_norms,
        "exit_reason": done.summary.get("exit_reason", ""),
    }


def row_of_job(
    job: FailingJob, arm: Arm, done: Run, calm: Mapping[str, Any], diagnoses: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Adds diagnoses, plan changes, and whether the run ended as intended. `calm`: row of the calm run."""
    purpose = {"job": job.name, "class": job.failure_class, "arm": arm, "injected": bool(job.faults)}
    row: dict[str, Any] = purpose | row_of(done)
    died = done.exit_code in OUT_OF_MEMORY
    if arm == "without":
        return row | {"as_intended": died, "diagnoses": list(diagnoses)}
    changes = done.plan_changes
    return row | {
        "as_intended": done.exit_code == ExitCode.COMPLETE if job.ends == "Complete" else died,
        "attempts": done.summary.get("attempts"),
        "remedies": [remedy_of(record) for record in changes],
        "seconds_lost": round(sum(record.change.seconds_to_recover or 0.0 for record in changes), 1),
        "largest_reward_difference": largest_difference(done.rewards, calm["rewards"]),
        "largest_gradient_norm_difference": largest_difference(done.gradient_norms, calm["gradient_norms"]),
    }


def merged(rows: Sequence[Mapping[str, Any]], newer: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`rows` with the rows of `newer`, which replace rows of the same job and arm.

    Sorted: the calm run first, then by name of the job, each job's arms in the order in which they ran.
    """
    by_name = {(row["job"], row["arm"]): dict(row) for row in [*rows, *newer]}
    order = get_args(Arm)
    return sorted(by_name.values(), key=lambda row: (row["arm"] != "calm", row["job"], order.index(row["arm"])))


def remedy_of(record: PlanChangeRecord) -> dict[str, Any]:
    """A change of the plan: its diagnosis, and its effect in bytes and in seconds, in all and by part."""
    change = record.change
    return {
        "diagnosed": change.diagnosis.class_name,
        "confidence": change.diagnosis.confidence,
        "setting": change.remedy.setting,
        "before": change.remedy.before,
        "after": change.remedy.after,
        "level": change.level,
        "expected_bytes": change.remedy.expected_bytes,
        "observed_bytes": change.remedy.observed_bytes,
        "seconds": change.seconds_to_recover,
        "parts": _rounded(record.seconds),
    }


def largest_difference(values: Sequence[float], calm: Sequence[float]) -> float | None:
    """Over the steps that both have; None if there is none."""
    return max((abs(value - other) for value, other in zip(values, calm, strict=False)), default=None)


def line(row: Mapping[str, Any]) -> str:
    settings = ", ".join(f"{remedy['setting']} {remedy['after']}" for remedy in row.get("remedies", ()))
    first: Mapping[str, Any] = next(iter(row.get("diagnoses", ())), {})
    shown = settings or " ".join(str(first[name]) for name in ("class", "confidence") if name in first)
    mark = "" if row.get("as_intended", True) else "  NOT AS INTENDED"
    ended = f"exit {row['exit_code']}, {row['steps']} steps"
    return f"{row['seconds']:6.1f} s  {row['job']:<20} {row['arm']:<8} {ended}  {shown}{mark}"


def _rounded(parts: Mapping[str, float]) -> dict[str, float]:
    return {name: round(seconds, 3) for name, seconds in parts.items()}
