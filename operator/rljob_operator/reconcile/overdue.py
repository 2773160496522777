"""A step that takes far longer than the one before it: told, and left alone. What it waits for, only people know."""

from __future__ import annotations

from datetime import UTC, datetime

from rljob_api.conditions import ConditionType
from rljob_api.step_report import StepReport
from rljob_operator.reconcile.timing import elapsed_seconds
from rljob_operator.reconcile.view import JobView

_SHORTEST_SECONDS = 600.0
"""However quick the steps are: a checkpoint may wait for its volume, a reward for its service."""
_TIMES_THE_STEP_BEFORE = 20.0
_FIRST_STEP_SECONDS = 1800.0
"""There is none before it to compare with."""


def overdue_step(view: JobView) -> str | None:
    """What has not come on for too long, as a sentence; None where steps come, or none is in progress."""
    if (since := _unchanged_since(view)) is None or _seconds_left(since, view):
        return None
    assert view.report is not None
    step = (view.report.step or 0) + 1
    phase = f" ({view.report.phase})" if view.report.phase else ""
    doing = f"step {step}{phase}" if step <= view.spec.algorithm.steps else "the model that is written in the end"
    before = _seconds_of_last_step(view.report)
    beside = f", and the step before took {before:.0f} s" if before is not None else ""
    return (
        f"{doing} is overdue: the trainer has reported nothing since {since.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
        f"{beside}; the log of the controller's pod and logs/ on the job's volume may say what it waits for"
    )


def overdue_seconds_left(view: JobView) -> float | None:
    """Seconds until the step in progress is overdue; None where none is in progress, or it is overdue already."""
    since = _unchanged_since(view)
    return None if since is None else _seconds_left(since, view) or None


def _unchanged_since(view: JobView) -> datetime | None:
    """When the trainer last reported, as it does whenever a phase begins; None where none is in progress."""
    report = view.report
    if report is None or view.attempt is None or report.attempt != view.attempt.number:
        return None
    return None if report.pending_end or not view.holds(ConditionType.RUNNING) else report.update_time


def _seconds_left(since: datetime, view: JobView) -> float:
    assert view.report is not None
    before = _seconds_of_last_step(view.report)
    allowed = _FIRST_STEP_SECONDS if before is None else max(_SHORTEST_SECONDS, _TIMES_THE_STEP_BEFORE * before)
    return max(0.0, allowed - elapsed_seconds(since, view.now))


def _seconds_of_last_step(report: StepReport) -> float | None:
    return None if report.seconds is None else sum(report.seconds.model_dump().values())
