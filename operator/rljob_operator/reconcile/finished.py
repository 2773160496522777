"""The end of an attempt and of the job, the life of a finished job, and its resumption."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from rljob_api.conditions import AttemptReason, ConditionReason, ConditionType
from rljob_api.job import RLJobSpec
from rljob_api.status import FailureStatus
from rljob_memory.recovery import Changed, GiveUp, Restart, respond
from rljob_operator.events import EventReason
from rljob_operator.reconcile.attempt_result import (
    MAX_UNCOUNTED_WITHOUT_PROGRESS,
    REQUESTED,
    AttemptResult,
    Complete,
    Failed,
    NotCounted,
    counted_attempts,
    uncounted_without_progress,
)
from rljob_operator.reconcile.desired import Desired
from rljob_operator.reconcile.memory_recovery import (
    constraints_of,
    failure_report,
    record_answer,
    record_failure,
    recovery_state,
)
from rljob_operator.reconcile.observed import ObservedPod
from rljob_operator.reconcile.pod_deletion import Termination, delete_pods
from rljob_operator.reconcile.status import StatusDraft, clipped
from rljob_operator.reconcile.timeouts import seconds_to_live
from rljob_operator.reconcile.view import JobView, elapsed_seconds, soonest

_LONGEST_ATTEMPT_MESSAGE = 1024
_CHANGED = ConditionReason.MEMORY_PLAN_CHANGED


def conclude(end: AttemptResult, draft: StatusDraft, view: JobView) -> Desired:
    """Record the end of the attempt, and what follows as conditions. Pods are touched later."""
    draft.change_attempt(
        reason=end.reason.value,
        message=clipped(end.message, _LONGEST_ATTEMPT_MESSAGE),
        exit_code=None if end.exit_code is None else int(end.exit_code),
        to_step=draft.status.step,
    )
    match end.verdict:
        case Complete():
            return _complete(draft, view)
        case NotCounted():
            draft.set(restarts=recovery_state(draft, view).effective_restarts)
            if problem := _endless(end, draft, view):
                return fail(problem, ConditionReason.NO_PROGRESS, draft, view)
            return _continue(end, ConditionReason.PODS_DISRUPTED, draft)
        case Failed() as failure:
            return _recover(end, failure, draft, view)


def fail(message: str, reason: ConditionReason, draft: StatusDraft, view: JobView) -> Desired:
    """The job has failed. Its pods go in the next round, in their order."""
    draft.condition(
        ConditionType.FAILED, True, reason, f"{message}{'' if message.endswith('.') else '.'} {HOW_TO_RESUME}"
    )
    draft.set(failure=failed_spec(view))
    draft.condition(ConditionType.RECOVERING, False, ConditionReason.GIVEN_UP, "the job has failed")
    draft.event("Warning", EventReason.JOB_FAILED, f"{reason.value}: {message}")
    return _finished(draft, view)


def _endless(end: AttemptResult, draft: StatusDraft, view: JobView) -> str | None:
    """Message about attempts that would be repeated for ever, since none is counted; None if they are few."""
    attempts = counted_attempts(draft.status)
    count = uncounted_without_progress(attempts, reports_steps=view.own_trainer, now=view.now)
    if count < MAX_UNCOUNTED_WITHOUT_PROGRESS:
        return None
    return (
        f"{count} attempts in a row ended before a step was committed, none of them by a failure of the job; "
        f"attempt {attempts[-1].number}: {end.message}"
    )


def _complete(draft: StatusDraft, view: JobView) -> Desired:
    steps = view.spec.algorithm.steps
    step = max(draft.status.step or 0, steps)
    draft.set(step=step)
    draft.change_attempt(to_step=step)
    draft.condition(ConditionType.COMPLETE, True, ConditionReason.ALL_STEPS_COMMITTED, f"{steps} steps are committed")
    if draft.holds(ConditionType.RECOVERING):
        draft.condition(ConditionType.RECOVERING, False, ConditionReason.RECOVERED, "the job is complete")
    draft.event("Normal", EventReason.JOB_COMPLETED, f"{steps} steps are committed")
    return _finished(draft, view)


def _finished(draft: StatusDraft, view: JobView) -> Desired:
    draft.set(completion_time=view.now, pods=[])
    if draft.attempt is not None and draft.attempt.end_time is None:
        draft.change_attempt(end_time=view.now)
    for type_ in (ConditionType.SCHEDULED, ConditionType.RUNNING):
        draft.condition(type_, False, ConditionReason.PODS_TERMINATED, "the job has ended")
    draft.reset(ConditionType.MEMORY_PRESSURE)
    return Desired()


def _recover(end: AttemptResult, failure: Failed, draft: StatusDraft, view: JobView) -> Desired:
    record_failure(failure, draft)
    state = recovery_state(draft, view)
    draft.set(restarts=state.effective_restarts)
    report = failure_report(end, failure, draft, view)
    match respond(report, state, constraints_of(failure.pod, view)):
        case Changed() as answer:
            record_answer(answer, draft)
            return _continue(replace(end, message=answer.message), _CHANGED, draft)
        case Restart() as answer:
            draft.set(restarts=answer.state.restarts)
            draft.change_attempt(message=clipped(answer.cause, _LONGEST_ATTEMPT_MESSAGE))
            return _continue(replace(end, message=answer.message), ConditionReason.SAME_PLAN_RESTART, draft)
        case GiveUp(reason, explanation):
            return fail(explanation, ConditionReason(reason.value), draft, view)


def _continue(end: AttemptResult, reason: ConditionReason, draft: StatusDraft) -> Desired:
    """Another attempt follows once the pods of this one are gone."""
    draft.set(pods=[])
    draft.condition(ConditionType.RUNNING, False, ConditionReason.STOPPING, end.message)
    draft.reset(ConditionType.MEMORY_PRESSURE)
    if end.reason == AttemptReason.PLACEMENT_TIMED_OUT:
        draft.condition(ConditionType.SCHEDULED, False, ConditionReason.PLACEMENT_TIMED_OUT, end.message)
        draft.event("Warning", EventReason.PLACEMENT_TIMED_OUT, end.message)
    elif end.reason not in REQUESTED:
        draft.condition(ConditionType.RECOVERING, True, reason, end.message)
        if reason != _CHANGED:  # which the Events OutOfMemory and PlanChanged have reported
            draft.event("Warning", EventReason.RESTARTING, f"{end.reason.value}: {end.message}")
    return Desired()


# --- A finished job ---


_ENDS_WITHIN_SECONDS = 30.0
"""Time for a waiting controller to exit, and for sidecars to terminate after their trainer."""
_ENDED = "the job has ended"


def run_finished(view: JobView, draft: StatusDraft) -> Desired:
    """Release the GPUs of a job, keep its controller pod for its logs, delete it after its time to live, or resume it.

    A pod in which a sidecar keeps running is not kept: it would hold its node's resources for ever.
    """
    if _has_more_steps(view):
        return _reopen(view, draft)
    if is_answered(view):
        resume(view, draft)
        return Desired()
    if view.holds(ConditionType.FAILED) and view.status.failure is None:  # by an earlier version of the operator
        draft.set(failure=failed_spec(view))
    if view.status.completion_time is None:
        draft.set(completion_time=view.now)
    left = seconds_to_live(view)
    if left == 0.0:
        return Desired(delete_job=True)
    ends_by_itself = _seconds_to_exit(view)
    kept = [pod for pod in view.observed.pods if _is_kept_for_logs(pod, view)]
    held = [pod for pod in kept if not pod.has_terminated]
    wait = _seconds_after_end(view) if held else None
    to_go = [pod for pod in view.observed.pods if pod not in kept or (pod in held and not wait)]
    if message := _held(held) if held else _ENDED if _is_whole(kept, view) else None:
        draft.condition(ConditionType.RUNNING, False, ConditionReason.PODS_TERMINATED, message)
    termination = Termination.of(view.observed, view.settings, view.now)
    deletions = Desired() if ends_by_itself else delete_pods(to_go, termination)
    requeue = soonest(left, wait, ends_by_itself, deletions.requeue_after_seconds)
    return replace(deletions, requeue_after_seconds=requeue)


def _is_kept_for_logs(pod: ObservedPod, view: JobView) -> bool:
    """Keep the controller pod, or all pods of another trainer, once their trainer has ended."""
    return pod.ended and (pod.role == "controller" or not view.own_trainer)


def _is_whole(kept: list[ObservedPod], view: JobView) -> bool:
    """No pod was deleted because of a sidecar."""
    return len(kept) == (1 if view.own_trainer else len(view.expected_pods))


def _held(pods: list[ObservedPod]) -> str:
    """Message about pods that sidecars keep from terminating. It stays in the condition after their deletion."""
    several = len(pods) > 1
    more = f" (and {len(pods) - 1} more)" if several else ""
    return (
        f"{_ENDED}; {pods[0].kept_by or f'pod {pods[0].name} has not terminated'}{more}: the operator deletes the "
        f"pod{'s' if several else ''} {_ENDS_WITHIN_SECONDS:.0f} s after the end, and the log is gone; to keep it, run "
        "sidecars as sidecar containers (initContainers with restartPolicy: Always)"
    )


def _seconds_to_exit(view: JobView) -> float | None:
    """Seconds for a controller that waits for a changed plan to exit by itself; a deletion would remove its logs."""
    return None if view.pending_exit is None else _seconds_after_end(view)


def _seconds_after_end(view: JobView) -> float | None:
    """Seconds until pods are deleted that should have terminated by themselves; None: now."""
    if view.status.completion_time is None:
        return None
    return max(0.0, _ENDS_WITHIN_SECONDS - elapsed_seconds(view.status.completion_time, view.now)) or None


def _has_more_steps(view: JobView) -> bool:
    return view.holds(ConditionType.COMPLETE) and (view.status.step or 0) < view.spec.algorithm.steps


def _reopen(view: JobView, draft: StatusDraft) -> Desired:
    message = f"{view.status.step or 0} of {view.spec.algorithm.steps} steps are committed"
    draft.condition(ConditionType.COMPLETE, False, ConditionReason.STEPS_RAISED, message)
    draft.set(completion_time=None)
    if draft.attempt is not None and draft.attempt.end_time is None:
        draft.change_attempt(end_time=view.now)
    draft.event("Normal", EventReason.STEPS_RAISED, message)
    return Desired()


# --- Resumption of a failed job ---


HOW_TO_RESUME = "The job resumes after a change of its spec; raise spec.retry if nothing else has to change."

_WITHOUT_EFFECT = {"suspend", "ttl_seconds_after_finished"}
"""Fields that stop or delete a job: nobody changes them to resume one."""


def failed_spec(view: JobView) -> FailureStatus:
    """The present spec, as that of a failure."""
    return FailureStatus(generation=view.observed.generation, spec_digest=_digest(view.job.spec))


def is_answered(view: JobView) -> bool:
    """The job has failed, and its spec has changed since.

    The failure has to be answered by a person, and every message about one names what to change: a setting of the
    memory, a limit of the recovery, a template, the deadline. Instead of a list of answers for each failure, every
    change of the spec counts, but for fields that cannot affect an attempt. A failure whose cause was outside the
    spec is answered by `spec.retry`.
    """
    failure = view.status.failure
    if failure is None or not view.holds(ConditionType.FAILED):
        return False
    # The generation too: the defaults of another version of the operator are no change by a person.
    return view.observed.generation > failure.generation and _digest(view.job.spec) != failure.spec_digest


def resumption_message(view: JobView, draft: StatusDraft) -> str:
    """`the job resumes at step 4`. After the last step, only what follows it is missing, such as the model."""
    step, steps = draft.status.step or 0, view.spec.algorithm.steps
    return f"the job resumes at step {step + 1}" if step < steps else f"the job resumes after step {step}, its last one"


def resume(view: JobView, draft: StatusDraft) -> None:
    """Clear the failure. The record of attempts stays; budgets and delays start afresh."""
    message = (
        f"the spec was changed after the failure (generation {view.observed.generation}): "
        f"{resumption_message(view, draft)}"
    )
    latest = draft.attempt
    if latest is not None and latest.end_time is None:
        draft.change_attempt(end_time=view.now)
    draft.condition(ConditionType.FAILED, False, ConditionReason.RESUMED, message)
    draft.reset(ConditionType.RECOVERING)
    draft.set(
        completion_time=None,
        failure=None,
        adjustments=0,
        restarts=0,
        resumed_from_attempt=latest.number + 1 if latest else 1,
    )
    draft.event("Normal", EventReason.RESUMED, message)


def _digest(spec: RLJobSpec) -> str:
    fields = spec.model_dump(mode="json", by_alias=True, exclude=_WITHOUT_EFFECT, exclude_defaults=True)
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
