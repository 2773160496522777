"""The StepReport, as far as it can be believed: the job's own pods write it, and they run the user's code."""

from __future__ import annotations

from rljob_api.step_report import StepReport
from rljob_operator.reconcile.observed import Observed

_LARGEST_ATTEMPT = 1_000_000


def usable_report(observed: Observed, steps: int) -> tuple[StepReport | None, str | None]:
    """The report, or None and what is wrong with it. A report that has not been written yet is nothing wrong."""
    report = observed.step_report
    if observed.step_report_problem:
        return None, f"the StepReport cannot be read: {observed.step_report_problem}"
    if report is None or report.attempt is None:
        return None, None
    wanted = max(steps, observed.status.steps or 0, observed.status.step or 0)
    if (report.step or 0) > wanted:
        return None, f"the StepReport tells of step {report.step}, but the job has {wanted}"
    latest = max(
        *(attempt.number for attempt in observed.status.attempts), *(pod.attempt for pod in observed.pods), 0, 0
    )
    if report.attempt > (latest or _LARGEST_ATTEMPT):
        return None, f"the StepReport tells of attempt {report.attempt}, but there were {latest}"
    return report, None
