"""The stored status and the StepReport, as far as they can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rljob_api.status import MAX_ATTEMPTS_KEPT, AttemptStatus, Condition, RLJobStatus
from rljob_api.step_report import StepReport
from rljob_operator.reconcile.observed import Observed, ObservedPod


def trusted_status(
    stored: RLJobStatus, pods: Sequence[ObservedPod], report: StepReport | None, now: datetime
) -> RLJobStatus:
    """`stored` without future times, each attempt once, and the attempt of the pods as the latest."""
    attempts = _adopt(_in_order(stored.attempts, now), stored, pods, report, now)
    return stored.model_copy(
        update={
            "attempts": attempts[-MAX_ATTEMPTS_KEPT:],
            "conditions": [_not_in_future(condition, now) for condition in stored.conditions],
            **{name: _past(getattr(stored, name), now) for name in ("start_time", "completion_time", "update_time")},
        }
    )


def _in_order(attempts: Sequence[AttemptStatus], now: datetime) -> list[AttemptStatus]:
    by_number = {attempt.number: attempt for attempt in attempts}
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
    report: StepReport | None,
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


_LARGEST_ATTEMPT = 1_000_000


def usable_report(observed: Observed, steps: int) -> tuple[StepReport | None, str | None]:
    """The report, or None and the error in it. An empty report has no error."""
    report = observed.step_report
    if observed.step_report_problem:
        return None, f"cannot parse the StepReport: {observed.step_report_problem}"
    if report is None or report.attempt is None:
        return None, None
    wanted = max(steps, observed.status.steps or 0, observed.status.step or 0)
    if (report.step or 0) > wanted:
        return None, f"the StepReport has step {report.step}, but the job has {wanted} steps"
    latest = max(
        *(attempt.number for attempt in observed.status.attempts), *(pod.attempt for pod in observed.pods), 0, 0
    )
    if report.attempt > (latest or _LARGEST_ATTEMPT):
        return None, f"the StepReport has attempt {report.attempt}, but the latest is {latest}"
    return report, None
