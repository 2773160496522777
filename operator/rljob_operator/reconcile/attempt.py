"""An attempt: its pods are created, watched, judged when one ends, and stopped; then the next attempt begins."""

from __future__ import annotations

from dataclasses import replace

from rljob_api.conditions import AttemptReason, ConditionReason, ConditionType
from rljob_api.status import AttemptStatus
from rljob_memory.next_plan import plan_of_next_attempt
from rljob_operator.events import EventReason
from rljob_operator.objects.placement import queue_of
from rljob_operator.reconcile.attempt_result import (
    AttemptResult,
    Complete,
    NotCounted,
    counted_attempts,
    restart_delay_seconds,
)
from rljob_operator.reconcile.conditions import (
    set_degraded_condition,
    set_memory_pressure_condition,
    set_recovering_condition,
    set_running_condition,
    set_scheduled_condition,
    settling_seconds_left,
)
from rljob_operator.reconcile.creation import (
    begin_in_place,
    build,
    create_missing,
    harmless_foreign_pods,
    restart_seconds_left,
    set_invalid_spec,
)
from rljob_operator.reconcile.desired import Desired
from rljob_operator.reconcile.failures import attempt_result, seconds_until_cause_is_clear
from rljob_operator.reconcile.finished import conclude, fail, resumption_message
from rljob_operator.reconcile.placement import (
    half_placed_seconds_left,
    half_placed_too_long,
    obstacle_to_pods,
    placement_retry_seconds,
    refusal,
)
from rljob_operator.reconcile.pod_deletion import delete_before_next_attempt
from rljob_operator.reconcile.pod_replacement import delete_lost, lost_pods, record_replacements, without
from rljob_operator.reconcile.status import StatusDraft
from rljob_operator.reconcile.timeouts import (
    cannot_start,
    deadline_exceeded,
    deadline_seconds_left,
    overdue_seconds_left,
    start_seconds_left,
)
from rljob_operator.reconcile.view import JobView, condition_of, elapsed_seconds, first_attempt_number, soonest

_RETRY_REFUSED_SECONDS = 30.0
_GARBAGE_COLLECTED_WITHIN_SECONDS = 60.0


def run_attempt(view: JobView, draft: StatusDraft) -> Desired:
    if view.leftovers:
        return delete_before_next_attempt(view.leftovers, view, draft)
    set_degraded_condition(view, draft)  # before the attempt is judged: the report of the last step comes with its end
    lost = lost_pods(view)
    judged = without(lost, view)
    if end := attempt_result(judged) or _reason_to_stop(view, judged):
        return conclude(end, draft, view)
    if record_replacements(lost, view, draft):
        return Desired()
    set_scheduled_condition(view, draft)
    set_running_condition(view, draft)
    set_recovering_condition(view, draft)
    set_memory_pressure_condition(view, draft)
    deletions = delete_lost(lost, view)
    desired = _create_missing_pods(view, draft) if view.missing else _verify_objects(view)
    return replace(
        desired,
        delete_pods=deletions.delete_pods,
        events=desired.events + deletions.events,
        requeue_after_seconds=soonest(
            desired.requeue_after_seconds,
            deletions.requeue_after_seconds,
            deadline_seconds_left(view),
            half_placed_seconds_left(view),
            start_seconds_left(judged),
            overdue_seconds_left(view),
            settling_seconds_left(view),
            seconds_until_cause_is_clear(view),
            restart_seconds_left(view),
        ),
    )


def _reason_to_stop(view: JobView, judged: JobView) -> AttemptResult | None:
    """Reason to stop an attempt whose pods would keep running. `judged`: the view without pods that are replaced."""
    if view.spec.suspend:
        return AttemptResult(AttemptReason.SUSPEND_REQUESTED, "spec.suspend is true", NotCounted())
    return deadline_exceeded(view) or cannot_start(judged) or half_placed_too_long(view)


def _create_missing_pods(view: JobView, draft: StatusDraft) -> Desired:
    """Create missing objects; if they are refused, set the condition and retry later."""
    if refused := refusal(view):
        _set_refused_condition(*refused, view, draft)
        if wait := _seconds_until_retry(view, refused[0]):
            return Desired(requeue_after_seconds=wait)
    elif view.observed.left_behind:
        _set_left_behind_condition(view.observed.left_behind, view, draft)
    assert view.attempt is not None
    objects = build(view, view.attempt.number)
    if isinstance(objects, str):
        return set_invalid_spec(objects, draft)
    if ignored := harmless_foreign_pods(view):
        message = f"ignoring foreign pods that have the labels of this job: {', '.join(ignored)}"
        draft.event("Warning", EventReason.FOREIGN_POD_IGNORED, message)
    desired = create_missing(objects, view)
    return replace(desired, requeue_after_seconds=_RETRY_REFUSED_SECONDS) if refused else desired


def _verify_objects(view: JobView) -> Desired:
    """The objects that running pods need. A claim in use cannot be deleted."""
    assert view.attempt is not None
    left = view.observed.objects_check_seconds
    if left != 0.0:
        return Desired(requeue_after_seconds=left)
    objects = build(view, view.attempt.number)
    if isinstance(objects, str):
        return Desired()
    others = tuple(manifest for manifest in objects.create if manifest["kind"] != "PersistentVolumeClaim")
    return Desired(verify=objects.apply + others, requeue_after_seconds=_RETRY_REFUSED_SECONDS)


def _set_refused_condition(reason: ConditionReason, message: str, view: JobView, draft: StatusDraft) -> None:
    stored = condition_of(view.status, ConditionType.SCHEDULED)
    if reason == ConditionReason.FOREIGN_OBJECT and (stored is None or stored.reason != reason):
        draft.event("Warning", EventReason.FOREIGN_OBJECT, message)
    draft.condition(ConditionType.SCHEDULED, False, reason, message)


def _set_left_behind_condition(message: str, view: JobView, draft: StatusDraft) -> None:
    """Garbage collection takes seconds. After a minute, a person has to act."""
    assert view.attempt is not None
    if elapsed_seconds(view.attempt.start_time, view.now) < _GARBAGE_COLLECTED_WITHIN_SECONDS:
        draft.condition(ConditionType.SCHEDULED, False, ConditionReason.WAITING_FOR_PODS, message)
        return
    advice = f"{message}; delete the object with its finalizers, or rename the job"
    stored = condition_of(view.status, ConditionType.SCHEDULED)
    if stored is None or stored.reason != ConditionReason.OBJECT_LEFT_BEHIND:
        draft.event("Warning", EventReason.OBJECT_LEFT_BEHIND, advice)
    draft.condition(ConditionType.SCHEDULED, False, ConditionReason.OBJECT_LEFT_BEHIND, advice)


def _seconds_until_retry(view: JobView, reason: ConditionReason) -> float:
    """0 if the creation may be retried. The condition is written first, and the retry follows later."""
    if reason == ConditionReason.NAMESPACE_TERMINATING:
        return _RETRY_REFUSED_SECONDS
    written = condition_of(view.status, ConditionType.SCHEDULED)
    if written is None or written.reason != reason or view.status.update_time is None:
        return _RETRY_REFUSED_SECONDS
    return max(0.0, _RETRY_REFUSED_SECONDS - elapsed_seconds(view.status.update_time, view.now))


def stop_attempt(view: JobView, draft: StatusDraft) -> Desired:
    """Steps that are committed while the pods stop count; if they were the last ones, the job is complete."""
    end = attempt_result(view)
    if end is not None and isinstance(end.verdict, Complete):
        return conclude(end, draft, view)
    assert view.attempt is not None
    controller = view.controller
    if view.attempt.exit_code is None and controller and controller.end:
        draft.change_attempt(exit_code=controller.end.exit_code, to_step=draft.status.step)
    if in_place := begin_in_place(view, draft):
        return in_place
    if view.observed.pods:
        return delete_before_next_attempt(view.observed.pods, view, draft, view.missing)
    draft.change_attempt(end_time=view.now, to_step=draft.status.step)
    for type_ in (ConditionType.SCHEDULED, ConditionType.RUNNING):
        draft.condition(
            type_, False, ConditionReason.PODS_TERMINATED, f"the pods of attempt {view.attempt.number} are gone"
        )
    return next_attempt(view, draft)


# --- Between attempts ---


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
    draft.set(pods=view.pods_by_role, plan=plan, start_time=start, completion_time=None)
    for type_ in (ConditionType.SCHEDULED, ConditionType.RUNNING):
        draft.reset(type_)


def _next_number(view: JobView, draft: StatusDraft) -> int:
    return first_attempt_number(view.observed) if draft.attempt is None else draft.attempt.number + 1
