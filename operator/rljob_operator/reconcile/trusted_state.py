"""The stored status and the StepReport, as far as they can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from rljob_api.status import MAX_ATTEMPTS_KEPT, AttemptStatus, Condition, RLJobStatus
from rljob_api.step_report import Evidence, StepReportStatus
from rljob_operator.reconcile.observed import Observed, ObservedPod


def trusted_status(
    stored: RLJobStatus, pods: Sequence[ObservedPod], report: StepReportStatus | None, now: datetime
) -> RLJobStatus:
    """`stored` without future times and impossible attempts, each attempt once, and that of the pods as the latest."""
    attempts = _adopt(_in_order(stored.attempts, now), stored, pods, report, now)
    return stored.model_copy(
        update={
            "attempts": attempts[-MAX_ATTEMPTS_KEPT:],
            "conditions": [_not_in_future(condition, now) for condition in stored.conditions],
            **{name: _past(getattr(stored, name), now) for name in ("start_time", "completion_time", "update_time")},
        }
    )


def _in_order(attempts: Sequence[AttemptStatus], now: datetime) -> list[AttemptStatus]:
    # Pods of an attempt beyond that would not be recognized.
    by_number = {attempt.number: attempt for attempt in attempts if attempt.number < LARGEST_NUMBER}
    return [
        attempt.model_copy(
            update={"start_time": _past(attempt.start_time, now), "end_time": _past(attempt.end_time, now)}
        )
        for _, attempt in sorted(by_number.items())
    ]


def _adopt(
    attempts: list[AttemptStatus],
    stored: RLJobStatus,
    pods: Sequence[ObservedPod],
    report: StepReportStatus | None,
    now: datetime,
) -> list[AttemptStatus]:
    """Add a record for an attempt that has pods and whose record was lost."""
    known = attempts[-1].number if attempts else 0
    unknown = [pod for pod in pods if pod.attempt > known]
    if not unknown:
        return attempts
    number = max(pod.attempt for pod in unknown)
    committed = max(stored.step or 0, (report.step or 0) if report and report.attempt != number else 0)
    adopted = AttemptStatus(
        number=number,
        plan_generation=stored.plan.generation if stored.plan else 1,
        start_time=min(now, *(pod.created_at for pod in unknown)),
        from_step=committed + 1,
        restarts_before={pod.name: pod.restart_count for pod in unknown},
    )
    return [*attempts, adopted]


def _not_in_future(condition: Condition, now: datetime) -> Condition:
    return condition.model_copy(update={"last_transition_time": _past(condition.last_transition_time, now)})


def _past(time: datetime | None, now: datetime) -> datetime | None:
    if time is None:
        return None
    return min(time if time.tzinfo else time.replace(tzinfo=UTC), now)


LARGEST_NUMBER = 1_000_000
"""Of an attempt or a generation: the operator counts on from a reported one."""

_CLOCKS_DIFFER_BY = timedelta(hours=1)


def possible_times(observed: Observed, now: datetime) -> tuple[datetime, datetime]:
    """Earliest and latest time that the job's pods can report."""
    return observed.created_at - _CLOCKS_DIFFER_BY, now + _CLOCKS_DIFFER_BY


def usable_report(observed: Observed, steps: int, now: datetime) -> tuple[StepReportStatus | None, str | None]:
    """The report, or None and the error in it. An empty report has no error, and neither has one from before the first
    attempt that is known."""
    report = observed.step_report
    if observed.step_report_problem:
        return None, f"cannot parse the StepReport: {observed.step_report_problem}"
    if report is None or report.attempt is None:
        return None, None
    latest = _latest_attempt(observed)
    if latest == 0:
        return None, None
    wanted = max(steps, observed.status.steps or 0, observed.status.step or 0)
    if (report.step or 0) > wanted:
        return None, f"the StepReport has step {report.step}, but the job has {wanted} steps"
    if report.attempt > latest:
        return None, f"the StepReport has attempt {report.attempt}, but the latest is {latest}"
    if report.plan is not None and report.plan.generation > LARGEST_NUMBER:
        return None, f"the StepReport has plan generation {report.plan.generation}; at most {LARGEST_NUMBER} is valid"
    return _with_possible_times(report, *possible_times(observed, now)), None


def first_attempt_number(observed: Observed) -> int:
    """Number of the attempt after those that only the StepReport knows of, because the status was lost."""
    reported = observed.step_report.attempt if observed.step_report else None
    return reported + 1 if reported is not None and reported < LARGEST_NUMBER else 1


def _latest_attempt(observed: Observed) -> int:
    """0 if there is neither a record of an attempt nor a pod."""
    recorded = [attempt.number for attempt in observed.status.attempts]
    return max([*recorded, *(pod.attempt for pod in observed.pods)], default=0)


def _with_possible_times(report: StepReportStatus, earliest: datetime, latest: datetime) -> StepReportStatus:
    """The report with its times between `earliest` and `latest`."""
    return report.model_copy(
        update={
            "update_time": report.update_time and clipped_time(report.update_time, earliest, latest),
            "last_evidence": report.last_evidence and with_possible_time(report.last_evidence, earliest, latest),
            "plan_changes": [
                change.model_copy(update={"time": clipped_time(change.time, earliest, latest)})
                for change in report.plan_changes
            ],
        }
    )


def with_possible_time(evidence: Evidence, earliest: datetime, latest: datetime) -> Evidence:
    return evidence.model_copy(update={"time": clipped_time(evidence.time, earliest, latest)})


def clipped_time(time: datetime, earliest: datetime, latest: datetime) -> datetime:
    """`time`, or the nearer of the bounds. A time that is not clipped can be converted to any time zone."""
    return max(earliest, min(time, latest))
