"""The stored status as it may be relied upon, whoever wrote it last.

The operator alone writes it, but people can. What only the operator could know stays as it is; what cannot be true is
put right here, and what is missing is derived again from the pods and the StepReport.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rljob_api.status import MAX_ATTEMPTS_KEPT, AttemptStatus, Condition, RLJobStatus
from rljob_api.step_report import StepReport
from rljob_operator.reconcile.observed import ObservedPod


def trusted_status(
    stored: RLJobStatus, pods: Sequence[ObservedPod], report: StepReport | None, now: datetime
) -> RLJobStatus:
    """`stored` without times to come and with every attempt once, the latest being that of the pods."""
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
    """Pods of an attempt that the status does not know: its record was lost, so it is written anew."""
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
