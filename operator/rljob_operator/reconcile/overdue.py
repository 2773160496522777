"""A step that takes far longer than the one before it: told, and left alone. What it waits for, only people know."""

from __future__ import annotations

from datetime import UTC

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
    if _seconds_left(view) != 0.0:
        return None
    report = view.report_of_attempt
    assert report is not None
    assert report.update_time is not None
    step = (report.step or 0) + 1
    phase = f" ({report.phase})" if report.phase else ""
    doing = f"step {step}{phase}" if step <= view.spec.algorithm.steps else "the model that is written in the end"
    before = _seconds_of_last_step(report)
    beside = f", and the step before took {before:.0f} s" if before is not None else ""
    return (
        f"{doing} is overdue: the trainer has reported nothing since "
        f"{report.update_time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC{beside}; "
        "the log of the controller's pod and logs/ on the job's volume may say what it waits for"
    )


def overdue_seconds_left(view: JobView) -> float | None:
    """Seconds until the step in progress is overdue; None where none is in progress, or it is overdue already."""
    return _seconds_left(view) or None


def _seconds_left(view: JobView) -> float | None:
    """0: it is overdue. Counted from the last report: the trainer sends one whenever a phase begins."""
    report = view.report_of_attempt
    if report is None or report.update_time is None or not view.holds(ConditionType.RUNNING):
        return None
    before = _seconds_of_last_step(report)
    allowed = _FIRST_STEP_SECONDS if before is None else max(_SHORTEST_SECONDS, _TIMES_THE_STEP_BEFORE * before)
    return max(0.0, allowed - elapsed_seconds(report.update_time, view.now))


def _seconds_of_last_step(report: StepReport) -> float | None:
    return None if report.seconds is None else sum(report.seconds.model_dump().values())
