"""Result of an attempt, its meaning for the job, and the delay before the next attempt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from rljob_api.conditions import AttemptReason
from rljob_api.status import AttemptStatus, RLJobStatus
from rljob_api.step_report import Evidence
from rljob_memory.recovery import GiveUpReason
from rljob_operator.reconcile.observed import ObservedPod
from rljob_operator.reconcile.view import elapsed_seconds


@dataclass(frozen=True, slots=True)
class Complete:
    """Every step is committed."""


@dataclass(frozen=True, slots=True)
class NotCounted:
    """Another attempt follows. The job did not cause the end, so nothing is counted."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt failed; the recovery engine decides what follows."""

    final: GiveUpReason | None = None
    """Reason why another attempt could not help; None if it could."""
    evidence: Evidence | None = None
    """Evidence of an out-of-memory failure, with its diagnoses; None for every other failure."""
    pod: ObservedPod | None = None
    """The pod whose memory ran out."""
    advice: str = ""
    """Change of the manifest that helps if the memory plan is not changed."""


Verdict = Complete | NotCounted | Failed


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """Reason why an attempt ends, and its meaning for the job."""

    reason: AttemptReason
    message: str
    """Cause, and advice if there is any."""
    verdict: Verdict
    exit_code: int | None = None


# --- The delay before the next attempt ---


LONGEST_DELAY_SECONDS = 300.0

REQUESTED = frozenset(
    {
        AttemptReason.SUSPEND_REQUESTED,
        AttemptReason.STEPS_RAISED,
        AttemptReason.PLACEMENT_TIMED_OUT,
        AttemptReason.NOT_RESTARTED_IN_PLACE,
        AttemptReason.ALL_STEPS_COMMITTED,
    }
)
"""Ends that are no failures: nothing has to recover from them."""

MAX_UNCOUNTED_WITHOUT_PROGRESS = 20
"""More attempts in a row that the cluster ended before they committed a step are a loop."""
_UNCOUNTED = frozenset({AttemptReason.PODS_DISRUPTED, AttemptReason.INTERRUPTED, AttemptReason.NOT_RESTARTED_IN_PLACE})
_PROGRESS_WITHOUT_STEPS_SECONDS = 3600.0
"""Another trainer reports no steps: an attempt that lasted this long counts as progress."""


def counted_attempts(status: RLJobStatus) -> list[AttemptStatus]:
    """The attempts since the job was last resumed from a failure; oldest first."""
    first = status.resumed_from_attempt or 1
    return [attempt for attempt in status.attempts if attempt.number >= first]


def restart_delay_seconds(attempts: Sequence[AttemptStatus], first_delay_seconds: float) -> float:
    """Seconds between the end of the last of `attempts` and the next.

    0 after progress, a change of the memory plan, or an end that was asked for; doubled with each further attempt in a
    row that committed nothing, whatever the cause.
    """
    without_progress = 0
    for attempt in reversed(attempts):
        if attempt.reason in REQUESTED or attempt.remedy is not None or committed_by(attempt) > 0:
            break
        without_progress += 1
    if without_progress == 0:
        return 0.0
    return min(first_delay_seconds * 2.0 ** (without_progress - 1), LONGEST_DELAY_SECONDS)


def uncounted_without_progress(attempts: Sequence[AttemptStatus], *, reports_steps: bool, now: datetime) -> int:
    """Number of the latest attempts that ended without progress, and without being counted as a restart."""
    count = 0
    for attempt in reversed(attempts):
        lasted_seconds = elapsed_seconds(attempt.start_time, attempt.end_time or now)
        progress = committed_by(attempt) > 0 if reports_steps else lasted_seconds >= _PROGRESS_WITHOUT_STEPS_SECONDS
        if progress or attempt.reason == AttemptReason.SUSPEND_REQUESTED:
            break
        count += attempt.reason in _UNCOUNTED
    return count


def committed_by(attempt: AttemptStatus) -> int:
    """Steps that an attempt committed."""
    return 0 if attempt.to_step is None else max(0, attempt.to_step - attempt.from_step + 1)
