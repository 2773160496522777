"""Between attempts: the old pods are deleted, obstacles are reported, and then the next attempt is written down."""

from __future__ import annotations

from rljob_api.conditions import AttemptReason, ConditionReason, ConditionType
from rljob_api.status import AttemptStatus
from rljob_memory.next_plan import plan_of_next_attempt
from rljob_operator.objects.gang_scheduling import queue_of
from rljob_operator.reconcile.desired import Desired
from rljob_operator.reconcile.ending import fail
from rljob_operator.reconcile.gang import placement_retry_seconds
from rljob_operator.reconcile.placement import obstacle_to_pods
from rljob_operator.reconcile.pod_deletion import delete_before_next_attempt
from rljob_operator.reconcile.progress import pods_by_role
from rljob_operator.reconcile.restarts import counted_attempts, restart_delay_seconds
from rljob_operator.reconcile.resumption import resumption_message
from rljob_operator.reconcile.status_draft import EventReason, StatusDraft
from rljob_operator.reconcile.timeouts import deadline_exceeded, deadline_seconds_left
from rljob_operator.reconcile.timing import elapsed_seconds, soonest
from rljob_operator.reconcile.trusted_state import first_attempt_number
from rljob_operator.reconcile.view import JobView

_OBSTACLE_RETRY_SECONDS = 60.0


def next_attempt(view: JobView, draft: StatusDraft) -> Desired:
    """Record the next attempt, or the reason for its delay. The reconcile that observes it creates the pods."""
    if view.observed.pods:
        return delete_before_next_attempt(view.observed.pods, view, draft)
    if view.spec.suspend:
        return _suspended(draft)
    _resume(view, draft)
    if end := deadline_exceeded(view):
        return fail(end.message, ConditionReason.DEADLINE_EXCEEDED, draft, view)
    if obstacle := obstacle_to_pods(view):
        draft.condition(ConditionType.SCHEDULED, False, *obstacle)
        return Desired(requeue_after_seconds=soonest(_OBSTACLE_RETRY_SECONDS, deadline_seconds_left(view)))
    if delay := _delay_seconds_left(view, draft):
        return Desired(requeue_after_seconds=soonest(delay, deadline_seconds_left(view)))
    _begin(view, draft)
    return Desired()


def _suspended(draft: StatusDraft) -> Desired:
    if not draft.holds(ConditionType.SUSPENDED):
        draft.event("Normal", EventReason.SUSPENDED, "the job is suspended until spec.suspend is false")
    for type_ in (ConditionType.SCHEDULED, ConditionType.RUNNING):
        draft.condition(type_, False, ConditionReason.SUSPEND_REQUESTED, "the job is suspended")
    draft.condition(ConditionType.SUSPENDED, True, ConditionReason.SUSPEND_REQUESTED, "spec.suspend is true")
    return Desired()


def _resume(view: JobView, draft: StatusDraft) -> None:
    if draft.holds(ConditionType.SUSPENDED):
        draft.condition(ConditionType.SUSPENDED, False, ConditionReason.RESUMED, "spec.suspend is false again")
        draft.event("Normal", EventReason.RESUMED, resumption_message(view, draft))


def _delay_seconds_left(view: JobView, draft: StatusDraft) -> float:
    """Seconds until the next attempt may begin, counted from the end of the last one. 0: now."""
    last = draft.attempt
    if last is None or last.end_time is None:
        return 0.0
    if last.reason == AttemptReason.PLACEMENT_TIMED_OUT:
        first, retries = view.settings.placement_retry_seconds, last.placement_retries
        delay = placement_retry_seconds(first, retries, view.observed.uid)
        reason, why = ConditionReason.PLACEMENT_TIMED_OUT, last.message or ""
    else:
        delay = restart_delay_seconds(counted_attempts(draft.status), view.settings.restart_delay_seconds)
        reason, why = ConditionReason.WAITING_TO_RESTART, f"attempt {last.number} ended ({last.reason})"
    left = max(0.0, delay - elapsed_seconds(last.end_time, view.now))
    if left:
        draft.condition(
            ConditionType.SCHEDULED, False, reason, f"{why}; the pods are created again after {delay:.0f} s"
        )
    return left


def _begin(view: JobView, draft: StatusDraft) -> None:
    plan = plan_of_next_attempt(view.job.spec, draft.status.plan, view.memory_profile)
    last = draft.attempt
    retried = last is not None and last.reason == AttemptReason.PLACEMENT_TIMED_OUT
    number = _next_number(view, draft)
    if retried:  # it committed nothing: its record is replaced by the next one
        draft.set(attempts=draft.status.attempts[:-1])
    draft.begin_attempt(
        AttemptStatus(
            number=number,
            plan_generation=plan.generation if plan else 1,
            start_time=view.now,
            from_step=(draft.status.step or 0) + 1,
            placement_retries=last.placement_retries + 1 if last and retried else 0,
        )
    )
    start = draft.status.start_time or (None if queue_of(view.job) else view.now)  # set once the queue has admitted it
    draft.set(pods=pods_by_role(view), plan=plan, start_time=start, completion_time=None)
    for type_ in (ConditionType.SCHEDULED, ConditionType.RUNNING):
        draft.reset(type_)


def _next_number(view: JobView, draft: StatusDraft) -> int:
    return first_attempt_number(view.observed) if draft.attempt is None else draft.attempt.number + 1
