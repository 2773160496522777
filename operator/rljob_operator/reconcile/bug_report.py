"""Reports about a job that the operator cannot reconcile."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_operator.event_note import EventNote
from rljob_operator.reconcile.status_draft import EventReason

_MAX_ERROR = 300


@dataclass(frozen=True, slots=True)
class BugReport:
    """A condition that is False, and an Event."""

    condition: ConditionType
    reason: ConditionReason
    event: EventNote


def report_bug(error: Exception) -> BugReport:
    """The job has not failed: a corrected operator continues it."""
    message = (
        f"the operator cannot reconcile this job ({type(error).__name__}: {str(error)[:_MAX_ERROR]}); this is a bug in "
        "the operator: report it with the operator's log, and change or delete the job"
    )
    return _report(message)


def report_unfinished(deaths: int) -> BugReport:
    """Report about a job during whose reconcile the operator's process has ended `deaths` times."""
    times = "once" if deaths == 1 else f"{deaths} times"
    return _report(
        f"the operator's process ended {times} while it reconciled this job, so it reconciles all other jobs first and "
        "waits before it tries again; shorten the job's templates, use fewer replicas, or delete the job"
    )


def _report(message: str) -> BugReport:
    event = EventNote("Warning", EventReason.RECONCILE_ERROR.value, message)
    return BugReport(ConditionType.FAILED, ConditionReason.RECONCILE_ERROR, event)
