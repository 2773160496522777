"""Results of a soak: outcomes of the jobs, delays by faults, and problems. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rljob_client.run_directory.records import FaultRecord, StepRecord
from rljob_testing.cluster import condition, holds, status
from rljob_testing.soak.faults import InjectedSoakFault
from rljob_testing.soak.jobs import JobOutcome

_MAY_GROW_BYTES = 64 << 20
"""Growth of the disk in use that is allowed: logs of pods that still exist."""
_MAY_GROW_SHARE = 1.5
"""Growth of the idle operator's memory that is allowed."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Footprint:
    """Disk and memory in use."""

    disk_bytes: int
    """Bytes on disk of nodes and volumes."""
    operator_bytes: int
    """Resident memory of the operator's process."""


@dataclass(frozen=True, slots=True)
class Soak:
    """Everything that was observed in a soak."""

    seed: int
    minutes: float
    """Minutes of faults."""
    streams: int
    """Jobs at a time."""
    seconds: float
    """Duration of the whole soak."""
    outcomes: Sequence[JobOutcome]
    faults: Sequence[InjectedSoakFault]
    before: Footprint
    after: Footprint
    leaks: Sequence[str]
    """Leaks that remained minutes after the last job was deleted."""
    kubernetes: str
    hostile_objects: Mapping[str, int] = field(default_factory=dict)
    """Objects that a hostile tenant stored during the soak, by kind; empty without one."""


def problems(soak: Soak) -> list[str]:
    """All problems; empty if every job is complete and nothing leaked."""
    found = [problem for outcome in soak.outcomes for problem in _problems_of_job(outcome)]
    found += [f"leaked: {line}" for line in soak.leaks]
    if soak.after.disk_bytes > soak.before.disk_bytes + _MAY_GROW_BYTES:
        found.append(f"disk in use grew from {soak.before.disk_bytes} to {soak.after.disk_bytes} bytes")
    if soak.after.operator_bytes > soak.before.operator_bytes * _MAY_GROW_SHARE:
        grown = f"from {soak.before.operator_bytes} to {soak.after.operator_bytes} bytes"
        found.append(f"the operator's memory grew {grown}")
    return found


def row(soak: Soak) -> Row:
    """The recorded row."""
    jobs = [_job(outcome) for outcome in soak.outcomes]
    changes = [change for outcome in soak.outcomes for change in status(outcome.job).get("planChanges", [])]
    waits = ((fault.kind, seconds_to_next_step(fault, soak.outcomes)) for fault in soak.faults)
    return {
        "seed": soak.seed,
        "minutes_of_faults": soak.minutes,
        "minutes": round(soak.seconds / 60, 1),
        "streams": soak.streams,
        "kubernetes": soak.kubernetes,
        "jobs": len(jobs),
        "complete": sum(job["ended"] == "Complete" for job in jobs),
        "steps": sum(job["steps"] for job in jobs),
        "jobs_by_kind": _by_kind(jobs),
        "faults": dict(Counter(fault.kind for fault in soak.faults)),
        "injected_failures": dict(Counter(name for job in jobs for name in job["failures"])),
        "attempts": dict(Counter(reason for job in jobs for reason in job["attempts"])),
        "plan_changes": dict(Counter(change["remedy"]["setting"] for change in changes)),
        "recovery_seconds_by_fault": _by(waits),
        "recovery_seconds_by_level": _by((change["level"], change.get("secondsToRecover")) for change in changes),
        "hostile_objects": dict(soak.hostile_objects),
        "leaks": list(soak.leaks),
        "problems": problems(soak),
        "disk_bytes": [soak.before.disk_bytes, soak.after.disk_bytes],
        "operator_bytes": [soak.before.operator_bytes, soak.after.operator_bytes],
    }


def seconds_to_next_step(fault: InjectedSoakFault, outcomes: Iterable[JobOutcome]) -> float | None:
    """Seconds from the fault until the last job that it may have disturbed commits a step.

    Includes other faults in between. None if no such job had a step left to commit.
    """
    waits = []
    for outcome in outcomes:
        if outcome.name in fault.jobs:
            later = [commit for commit in _commits(outcome) if commit > fault.at]
            waits += [min(later) - fault.at] if later else []
    return max(waits, default=None)


def _problems_of_job(outcome: JobOutcome) -> list[str]:
    found = [f"{outcome.name}: {outcome.ledger_error}"] if outcome.ledger_error else []
    wanted = outcome.job["spec"]["algorithm"]["steps"]
    if not holds("Complete")(outcome.job):
        message = condition(outcome.job, "Failed").get("message") or "it had not ended when the soak did"
        return [*found, f"{outcome.name} is not complete: {message}"]
    committed = [record.step for record in outcome.ledger if isinstance(record, StepRecord)]
    if committed != list(range(1, wanted + 1)):
        found.append(f"{outcome.name}: expected steps 1 to {wanted}, each once, found {len(committed)} in its ledger")
    return found


def _job(outcome: JobOutcome) -> Row:
    ended = next((kind for kind in ("Complete", "Failed") if holds(kind)(outcome.job)), "Unfinished")
    given = [f"{record.fault_class}@{record.phase}" for record in outcome.ledger if isinstance(record, FaultRecord)]
    return {
        "kind": _kind(outcome.job["spec"]),
        "ended": ended,
        "steps": len(_commits(outcome)),
        "failures": given,
        "attempts": [attempt.get("reason", "Unfinished") for attempt in status(outcome.job).get("attempts", [])],
    }


def _kind(spec: Mapping[str, Any]) -> str:
    """Topology and worker pods of a job: `Colocated, 2 policy`, `Disaggregated, 1 policy, 2 rollout`."""
    pods = {role: spec.get(role, {}).get("replicas") for role in ("policy", "rollout")}
    staleness = ["maxStaleness: 1"] if spec["algorithm"].get("maxStaleness") else []
    size = spec.get("rollout", {}).get("tensorParallelSize", "Auto")
    partial = spec["algorithm"].get("partialRolloutPrompts")
    engines = [f"engines of {size}"] * (size not in ("Auto", 1)) + ["partial rollouts"] * bool(partial)
    counts = (f"{count} {role}" for role, count in pods.items() if count)
    return ", ".join([spec["topology"], *counts, *staleness, *engines])


def _by_kind(jobs: Sequence[Row]) -> Row:
    """Jobs, complete jobs, steps and injected failures, by kind of job."""
    found: dict[str, list[Row]] = {}
    for job in jobs:
        found.setdefault(job["kind"], []).append(job)
    return {
        kind: {
            "jobs": len(alike),
            "complete": sum(job["ended"] == "Complete" for job in alike),
            "steps": sum(job["steps"] for job in alike),
            "injected_failures": sum(len(job["failures"]) for job in alike),
        }
        for kind, alike in sorted(found.items())
    }


def _by(pairs: Iterable[tuple[str, float | None]]) -> Row:
    """Count, median and worst of the numbers, by name."""
    found: dict[str, list[float]] = {}
    for name, seconds in pairs:
        found.setdefault(name, []).extend([] if seconds is None else [seconds])
    return {
        name: {"count": len(all_), "median": round(statistics.median(all_), 1), "worst": round(max(all_), 1)}
        for name, all_ in sorted(found.items())
        if all_
    }


def _commits(outcome: JobOutcome) -> list[float]:
    """Commit times of the steps, in seconds since the epoch."""
    return [record.committed_at for record in outcome.ledger if isinstance(record, StepRecord)]
