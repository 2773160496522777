"""The lifecycle of a job, decided from an observation. Pure: no clock, no I/O.

A job goes through attempts. Each has a record in the status before anything of it exists in the cluster:

    between attempts ──▶ live ──▶ stopping ──▶ between attempts      (suspended, restarted, disrupted, more steps)
                          └─────▶ finished                            (complete, failed)

The stage of a job is derived from its stored status alone, so the operator can be killed between any two writes: the
next reconcile observes the same state and does the rest.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from rljob_api.conditions import AttemptReason, ConditionReason, ConditionType
from rljob_memory.next_plan import plan_of_next_attempt
from rljob_operator import labels
from rljob_operator.events import EventNote, EventReason
from rljob_operator.objects.placement import queue_of
from rljob_operator.reconcile import conditions, pods, profile, timers
from rljob_operator.reconcile.desired import AttemptResult, Desired
from rljob_operator.reconcile.failures import attempt_result, seconds_until_cause_is_clear
from rljob_operator.reconcile.finished import conclude, fail, resumption_message, run_finished
from rljob_operator.reconcile.fits import not_admitted, set_fits
from rljob_operator.reconcile.memory_recovery import prevent_kill, record_plan
from rljob_operator.reconcile.observed import ObservedJob
from rljob_operator.reconcile.placement import (
    half_placed_seconds_left,
    half_placed_too_long,
    obstacle_to_pods,
    refusal,
)
from rljob_operator.reconcile.pod_deletion import (
    delete_before_next_attempt,
    finish_deletion,
    uses_finalizer,
    workloads_to_delete,
)
from rljob_operator.reconcile.status import StatusDraft, bounded, display, due_write, summarize
from rljob_operator.reconcile.view import (
    JobView,
    Stage,
    build_view,
    elapsed_seconds,
    first_attempt_number,
    soonest,
)
from rljob_operator.settings import OperatorSettings


def reconcile(observed: ObservedJob, settings: OperatorSettings, now: datetime) -> Desired:
    """Decide the writes for one job. Deterministic; does not raise for an invalid job."""
    if observed.delegated:
        # A manifest that was copied from another job may have brought the finalizer along.
        return Desired(finalizer=False) if observed.deleting and observed.has_finalizer else Desired()
    if observed.operator not in ("", settings.installation):
        return _left_to(observed.operator, settings.installation)
    now = now.replace(microsecond=0)  # as Kubernetes writes times
    desired = replace(_decide(observed, settings, now), delete_workloads=workloads_to_delete(observed))
    writes = replace(desired, requeue_after_seconds=None, is_status_delayed=False) != Desired()
    return replace(desired, claim=settings.installation) if writes and not observed.operator else desired


def _left_to(other: str, own: str) -> Desired:
    message = (
        f"the operator {other} reconciles this job (annotation {labels.OPERATOR}), so {own} leaves it alone; "
        f"uninstall one of them, or list different namespaces; if {other} is gone: kubectl annotate rljobs --all "
        f"--all-namespaces {labels.OPERATOR}-"
    )
    return Desired(events=(EventNote("Warning", EventReason.MANAGED_BY_ANOTHER_OPERATOR, message),))


def _decide(observed: ObservedJob, settings: OperatorSettings, now: datetime) -> Desired:
    if observed.deleting:
        draft = StatusDraft(observed.status, observed.generation, now)
        desired = finish_deletion(observed, draft, settings, now)
        if draft.reason(ConditionType.SCHEDULED) not in (
            ConditionReason.NODE_LOST,
            ConditionReason.POD_NOT_TERMINATING,
        ):
            return desired  # nobody reads the status of a job that is about to be gone
        draft.condition(ConditionType.RUNNING, False, ConditionReason.STOPPING, "the job is being deleted")
        return _with_status(desired, draft, observed, settings, now)
    if observed.job is None:
        draft = StatusDraft(observed.status, observed.generation, now)
        _report_invalid_spec(observed, draft)
        return _with_status(Desired(), draft, observed, settings, now)

    view = build_view(observed, observed.job, settings, now)
    draft = StatusDraft(view.status, observed.generation, now)
    conditions.record_progress(view, draft)
    record_plan(view, draft)
    if view.stage is not Stage.FINISHED:
        set_fits(view, draft)
    if view.stage is not Stage.FINISHED and draft.reason(ConditionType.FAILED) != ConditionReason.RESUMED:
        draft.reset(ConditionType.FAILED)  # a report of a bug (Executor.report) is out of date
    stages = {
        Stage.BETWEEN_ATTEMPTS: _next_attempt,
        Stage.LIVE: _run_attempt,
        Stage.STOPPING: _stop_attempt,
        Stage.FINISHED: run_finished,
    }
    desired = replace(stages[view.stage](view, draft), decision=pods.exit_decision(view))
    desired = _with_status(desired, draft, observed, settings, now)
    if desired.status is None:
        return desired
    manifest, surplus = profile.record(view, draft)
    return replace(desired, profile=manifest, delete_profiles=surplus)


def _with_status(
    desired: Desired, draft: StatusDraft, observed: ObservedJob, settings: OperatorSettings, now: datetime
) -> Desired:
    """Return `desired` with the drafted status, if it is due for a write, and the finalizer."""
    summarize(draft)
    if observed.job is not None:
        draft.observe_generation()
    draft.set(display=display(draft.status))
    status, interval = bounded(draft.status), settings.status_interval_seconds
    wait_seconds, is_delayed = due_write(observed.status, status, interval, observed.status_wait_seconds, now)
    keeps_finalizer = observed.deleting or observed.has_finalizer == uses_finalizer(settings)
    return replace(
        desired,
        finalizer=desired.finalizer if keeps_finalizer else uses_finalizer(settings),
        status=status.model_copy(update={"update_time": now}) if wait_seconds == 0.0 else None,
        is_status_delayed=is_delayed,
        # Events of a change come with its write: until then, each reconcile drafts them again.
        events=desired.events if is_delayed else desired.events + tuple(draft.events),
        requeue_after_seconds=soonest(desired.requeue_after_seconds, wait_seconds or None),
    )


# --- A live attempt ---


_RETRY_REFUSED_SECONDS = 30.0
_GARBAGE_COLLECTED_WITHIN_SECONDS = 60.0


def _run_attempt(view: JobView, draft: StatusDraft) -> Desired:
    if view.leftovers:
        return delete_before_next_attempt(view.leftovers, view, draft)
    conditions.set_degraded(view, draft)  # before the attempt is judged: the report of the last step comes with its end
    lost = pods.lost_pods(view)
    judged = pods.without(lost, view)
    if end := attempt_result(judged) or _reason_to_stop(view, judged):
        conclude(end, draft, view)
        return Desired()
    if pods.record_replacements(lost, view, draft):
        return Desired()
    conditions.set_scheduled(view, draft)
    conditions.set_running(view, draft)
    conditions.set_recovering(view, draft)
    conditions.set_memory_pressure(view, draft)
    prevent_kill(view, draft)
    deletions = pods.delete_lost(lost, view)
    desired = _create_missing_pods(view, draft) if view.missing else _verify_objects(view)
    return replace(
        desired,
        resize_pods=pods.resizes(view),
        delete_pods=deletions.delete_pods,
        events=desired.events + deletions.events,
        requeue_after_seconds=soonest(
            desired.requeue_after_seconds,
            deletions.requeue_after_seconds,
            timers.deadline_seconds_left(view),
            half_placed_seconds_left(view),
            timers.start_seconds_left(judged),
            timers.overdue_seconds_left(view),
            conditions.settling_seconds_left(view),
            seconds_until_cause_is_clear(view),
            pods.restart_seconds_left(view),
        ),
    )


def _reason_to_stop(view: JobView, judged: JobView) -> AttemptResult | None:
    """Return the reason to stop an attempt whose pods would keep running. `judged`: the view without pods that are
    replaced."""
    if view.spec.suspend:
        return AttemptResult(AttemptReason.SUSPEND_REQUESTED, "spec.suspend is true")
    return timers.deadline_exceeded(view) or timers.cannot_start(judged) or half_placed_too_long(view)


def _create_missing_pods(view: JobView, draft: StatusDraft) -> Desired:
    """Create missing objects; if they are refused, set the condition and retry later."""
    assert view.attempt is not None
    refused = refusal(view)
    if refused is not None:
        draft.condition(ConditionType.SCHEDULED, False, *refused)
        if wait := _seconds_until_retry(view, refused[0]):
            return Desired(requeue_after_seconds=wait)
    elif message := view.observed.left_behind:
        # Garbage collection takes seconds. After a minute, a person has to act.
        reason = ConditionReason.WAITING_FOR_PODS
        if elapsed_seconds(view.attempt.start_time, view.now) >= _GARBAGE_COLLECTED_WITHIN_SECONDS:
            reason = ConditionReason.OBJECT_LEFT_BEHIND
            message = f"{message}; delete the object with its finalizers, or rename the job"
        draft.condition(ConditionType.SCHEDULED, False, reason, message)
    objects = pods.build(view, view.attempt.number)
    if isinstance(objects, str):
        _set_invalid_spec(objects, draft)
        return Desired()
    if ignored := sorted(set(view.observed.foreign_pods) - {name for name, _ in view.expected_pods}):
        message = f"ignoring foreign pods that have the labels of this job: {', '.join(ignored)}"
        draft.event("Warning", EventReason.FOREIGN_POD_IGNORED, message)
    names = set(view.missing)
    missing = tuple(pod for pod in objects.pods if pod["metadata"]["name"] in names)
    return Desired(
        required_config_map=objects.required_config_map,
        apply=objects.apply,
        create=objects.create + missing,  # a pod that starts before its Secret exists waits for the next kubelet retry
        events=objects.notices,
        requeue_after_seconds=_RETRY_REFUSED_SECONDS if refused else None,
    )


def _seconds_until_retry(view: JobView, reason: ConditionReason) -> float:
    """0 if the creation may be retried. The condition is written first, and the retry follows later."""
    stored = view.condition(ConditionType.SCHEDULED)
    is_new = stored is None or stored.reason != reason or view.status.update_time is None
    if is_new or reason == ConditionReason.NAMESPACE_TERMINATING:
        return _RETRY_REFUSED_SECONDS
    return max(0.0, _RETRY_REFUSED_SECONDS - elapsed_seconds(view.status.update_time or view.now, view.now))


def _verify_objects(view: JobView) -> Desired:
    """Look up the objects that running pods need. A claim in use cannot be deleted."""
    assert view.attempt is not None
    left = view.observed.objects_check_seconds
    if left != 0.0:
        return Desired(requeue_after_seconds=left)
    objects = pods.build(view, view.attempt.number)
    if isinstance(objects, str):
        return Desired()
    others = tuple(manifest for manifest in objects.create if manifest["kind"] != "PersistentVolumeClaim")
    return Desired(verify=objects.apply + others, requeue_after_seconds=_RETRY_REFUSED_SECONDS)


def _stop_attempt(view: JobView, draft: StatusDraft) -> Desired:
    """Steps that are committed while the pods stop count; if they were the last ones, the job is complete."""
    assert view.attempt is not None
    end = attempt_result(view)
    if end is not None and end.reason == AttemptReason.ALL_STEPS_COMMITTED:
        conclude(end, draft, view)
        return Desired()
    controller = view.controller
    if view.attempt.exit_code is None and controller and controller.end:
        draft.change_attempt(exit_code=controller.end.exit_code, to_step=draft.status.step)
    if in_place := pods.begin_in_place(view, draft):
        return in_place
    if view.observed.pods:
        return delete_before_next_attempt(view.observed.pods, view, draft, view.missing)
    draft.change_attempt(end_time=view.now, to_step=draft.status.step)
    draft.no_pods_run(ConditionReason.PODS_TERMINATED, f"the pods of attempt {view.attempt.number} are gone")
    return _next_attempt(view, draft)


# --- Between attempts ---


_OBSTACLE_RETRY_SECONDS = 60.0


def _next_attempt(view: JobView, draft: StatusDraft) -> Desired:
    """Record the next attempt, or the reason for its delay. The reconcile that observes it creates the pods."""
    if view.observed.pods:
        return delete_before_next_attempt(view.observed.pods, view, draft)
    if view.spec.suspend:
        if not draft.holds(ConditionType.SUSPENDED):
            draft.event("Normal", EventReason.SUSPENDED, "the job is suspended until spec.suspend is false")
        draft.no_pods_run(ConditionReason.SUSPEND_REQUESTED, "the job is suspended")
        draft.condition(ConditionType.SUSPENDED, True, ConditionReason.SUSPEND_REQUESTED, "spec.suspend is true")
        return Desired()
    if draft.holds(ConditionType.SUSPENDED):
        draft.condition(ConditionType.SUSPENDED, False, ConditionReason.RESUMED, "spec.suspend is false again")
        draft.event("Normal", EventReason.RESUMED, resumption_message(view, draft))
    if end := timers.deadline_exceeded(view):
        fail(end.message, ConditionReason.DEADLINE_EXCEEDED, draft, view)
        return Desired()
    if obstacle := obstacle_to_pods(view) or not_admitted(view, draft):
        draft.condition(ConditionType.SCHEDULED, False, *obstacle)
        return Desired(requeue_after_seconds=soonest(_OBSTACLE_RETRY_SECONDS, timers.deadline_seconds_left(view)))
    if delay := _delay_seconds_left(view, draft):
        return Desired(requeue_after_seconds=soonest(delay, timers.deadline_seconds_left(view)))
    _begin(view, draft)
    return Desired()


def _delay_seconds_left(view: JobView, draft: StatusDraft) -> float:
    """Seconds until the next attempt may begin, counted from the end of the last one. 0: now."""
    last = draft.attempt
    if last is None or last.end_time is None:
        return 0.0
    if last.reason == AttemptReason.PLACEMENT_TIMED_OUT:
        first, retries = view.settings.placement_retry_seconds, last.placement_retries
        delay = timers.placement_retry_seconds(first, retries, view.observed.uid)
        reason, cause = ConditionReason.PLACEMENT_TIMED_OUT, last.message or ""
    else:
        delay = timers.restart_delay_seconds(timers.counted_attempts(draft.status), view.settings.restart_delay_seconds)
        reason, cause = ConditionReason.WAITING_TO_RESTART, f"attempt {last.number} ended ({last.reason})"
    left = max(0.0, delay - elapsed_seconds(last.end_time, view.now))
    if left:
        message = f"{cause}; the pods are created again after {delay:.0f} s"
        draft.condition(ConditionType.SCHEDULED, False, reason, message)
    return left


def _begin(view: JobView, draft: StatusDraft) -> None:
    known = draft.status.plan or profile.first_plan(view, draft)
    plan = plan_of_next_attempt(view.job.spec, known, view.memory_facts)
    start = draft.status.start_time or (None if queue_of(view.job) else view.now)  # set once the queue has admitted it
    draft.set(pods=view.pods_by_role, plan=plan, start_time=start, completion_time=None)
    last, retries = draft.attempt, 0
    if last is not None and last.reason == AttemptReason.PLACEMENT_TIMED_OUT:
        # It committed nothing: its record is replaced by the next one.
        retries = last.placement_retries + 1
        draft.set(attempts=draft.status.attempts[:-1])
    number = first_attempt_number(view.observed) if last is None else last.number + 1
    draft.begin_attempt(number, plan, placement_retries=retries)
    draft.reset(ConditionType.SCHEDULED, ConditionType.RUNNING)


# --- Invalid specs ---


def _report_invalid_spec(observed: ObservedJob, draft: StatusDraft) -> None:
    """Report a job that cannot be parsed. Running pods keep the spec that they started with."""
    problem = observed.problem or "cannot parse the spec"
    if draft.status.completion_time is not None:
        return
    if any(not pod.ended for pod in observed.pods):
        draft.invalid_spec = f"the running attempt keeps its spec; the changed spec is invalid: {problem}"
        return
    if draft.holds(ConditionType.RUNNING):
        draft.condition(ConditionType.RUNNING, False, ConditionReason.PODS_TERMINATED, "the pods have terminated")
    _set_invalid_spec(problem, draft)


def _set_invalid_spec(problem: str, draft: StatusDraft) -> None:
    """Record that no attempt can use the spec. This is no failure of the job, which continues with a corrected spec."""
    if draft.reason(ConditionType.STALLED) != ConditionReason.INVALID_SPEC:
        draft.event("Warning", EventReason.INVALID_SPEC, problem)
    draft.invalid_spec = f"{problem}; fix the spec with kubectl apply"
