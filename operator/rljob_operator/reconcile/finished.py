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
from rljob_operator.reconcile import memory_recovery, timers
from rljob_operator.reconcile.desired import AttemptFailure, AttemptResult, Desired
from rljob_operator.reconcile.observed import ObservedPod
from rljob_operator.reconcile.pod_deletion import delete_pods
from rljob_operator.reconcile.status import StatusDraft, clipped
from rljob_operator.reconcile.view import JobView, and_more, elapsed_seconds, soonest

_MAX_ATTEMPT_MESSAGE_CHARACTERS = 1024
_ENDED = "the job has ended"


def conclude(end: AttemptResult, draft: StatusDraft, view: JobView) -> None:
    """Record the end of the attempt, and what follows as conditions. Pods are deleted in a later reconcile."""
    draft.change_attempt(
        reason=end.reason.value,
        message=clipped(end.message, _MAX_ATTEMPT_MESSAGE_CHARACTERS),
        exit_code=None if end.exit_code is None else int(end.exit_code),
        to_step=draft.status.step,
    )
    if end.reason == AttemptReason.ALL_STEPS_COMMITTED:
        _complete(draft, view)
    elif end.failure is not None:
        _recover(end, end.failure, draft, view)
    else:
        draft.set(restarts=memory_recovery.recovery_state(draft, view).effective_restarts)
        attempts = timers.counted_attempts(draft.status)
        count = timers.uncounted_without_progress(attempts, reports_steps=view.own_trainer, now=view.now)
        if count < timers.MAX_UNCOUNTED_WITHOUT_PROGRESS:
            _continue(end, ConditionReason.PODS_DISRUPTED, end.message, draft)
            return
        message = (
            f"{count} attempts in a row ended before a step was committed, none of them by a failure of the job; "
            f"attempt {attempts[-1].number}: {end.message}"
        )
        fail(message, ConditionReason.NO_PROGRESS, draft, view)


def fail(message: str, reason: ConditionReason, draft: StatusDraft, view: JobView) -> None:
    """Record that the job has failed."""
    draft.condition(
        ConditionType.FAILED, True, reason, f"{message}{'' if message.endswith('.') else '.'} {HOW_TO_RESUME}"
    )
    draft.set(failure=_present_spec(view))
    draft.condition(ConditionType.RECOVERING, False, ConditionReason.GIVEN_UP, "the job has failed")
    draft.event("Warning", EventReason.JOB_FAILED, f"{reason.value}: {message}")
    _finish(draft, view)


def _complete(draft: StatusDraft, view: JobView) -> None:
    steps = view.spec.algorithm.steps
    step = max(draft.status.step or 0, steps)
    draft.set(step=step)
    draft.change_attempt(to_step=step)
    draft.condition(ConditionType.COMPLETE, True, ConditionReason.ALL_STEPS_COMMITTED, f"{steps} steps are committed")
    if draft.holds(ConditionType.RECOVERING):
        draft.condition(ConditionType.RECOVERING, False, ConditionReason.RECOVERED, "the job is complete")
    draft.event("Normal", EventReason.JOB_COMPLETED, f"{steps} steps are committed")
    _finish(draft, view)


def _finish(draft: StatusDraft, view: JobView) -> None:
    draft.set(completion_time=view.now, pods=[])
    draft.end_attempt()
    draft.no_pods_run(ConditionReason.PODS_TERMINATED, _ENDED)
    draft.reset(ConditionType.MEMORY_PRESSURE)


def _recover(end: AttemptResult, failure: AttemptFailure, draft: StatusDraft, view: JobView) -> None:
    if failure.evidence is not None:
        memory_recovery.record_failure(failure.evidence, draft)
    state = memory_recovery.recovery_state(draft, view)
    draft.set(restarts=state.effective_restarts)
    report = memory_recovery.failure_report(end, failure, draft, view)
    match respond(report, state, memory_recovery.constraints_of(failure.pod, view)):
        case Changed() as answer:
            memory_recovery.record_answer(answer, draft)
            _continue(end, ConditionReason.MEMORY_PLAN_CHANGED, answer.message, draft)
        case Restart() as answer:
            draft.set(restarts=answer.state.restarts)
            draft.change_attempt(message=clipped(answer.cause, _MAX_ATTEMPT_MESSAGE_CHARACTERS))
            _continue(end, ConditionReason.SAME_PLAN_RESTART, answer.message, draft)
        case GiveUp(reason, explanation):
            fail(explanation, ConditionReason(reason.value), draft, view)


def _continue(end: AttemptResult, reason: ConditionReason, message: str, draft: StatusDraft) -> None:
    """Another attempt follows once the pods of this one are gone."""
    draft.set(pods=[])
    draft.condition(ConditionType.RUNNING, False, ConditionReason.STOPPING, message)
    draft.reset(ConditionType.MEMORY_PRESSURE)
    if end.reason == AttemptReason.PLACEMENT_TIMED_OUT:
        draft.condition(ConditionType.SCHEDULED, False, ConditionReason.PLACEMENT_TIMED_OUT, message)
        draft.event("Warning", EventReason.PLACEMENT_TIMED_OUT, message)
    elif end.reason not in timers.REQUESTED:
        draft.condition(ConditionType.RECOVERING, True, reason, message)
        if reason != ConditionReason.MEMORY_PLAN_CHANGED:  # which the Events OutOfMemory and PlanChanged have reported
            draft.event("Warning", EventReason.RESTARTING, f"{end.reason.value}: {message}")


# --- A finished job ---


_EXIT_SECONDS = 30.0
"""Time for a waiting controller to exit, and for sidecars to terminate after their trainer."""


def run_finished(view: JobView, draft: StatusDraft) -> Desired:
    """Release the GPUs of a job, keep its controller pod for its logs, delete it after its time to live, or resume it.

    The controller pod, or all pods of another trainer, are kept once their trainer has ended. A pod in which a sidecar
    keeps running is not: it would hold its node's resources forever.
    """
    if _has_more_steps(view):
        _reopen(view, draft)
        return Desired()
    if _spec_has_changed(view):
        _resume(view, draft)
        return Desired()
    if view.holds(ConditionType.FAILED) and view.status.failure is None:
        draft.set(failure=_present_spec(view))  # a later change resumes the job
    ended = view.status.completion_time
    if ended is None:
        draft.set(completion_time=view.now)
    seconds_left = timers.seconds_to_live(view)
    if seconds_left == 0.0:
        return Desired(delete_job=True)
    exit_seconds_left = max(0.0, _EXIT_SECONDS - elapsed_seconds(ended, view.now)) if ended else 0.0
    pods = view.observed.pods
    kept = [pod for pod in pods if pod.ended and (pod.role == "controller" or not view.own_trainer)]
    running = [pod for pod in kept if not pod.has_terminated]
    if running:  # the message stays in the condition after their deletion
        draft.condition(ConditionType.RUNNING, False, ConditionReason.PODS_TERMINATED, _sidecars_run(running))
    elif len(kept) == (1 if view.own_trainer else len(view.expected_pods)):
        draft.condition(ConditionType.RUNNING, False, ConditionReason.PODS_TERMINATED, _ENDED)
    if view.pending_exit is not None and exit_seconds_left:
        # The controller exits by itself; a deletion would remove its logs.
        return Desired(requeue_after_seconds=soonest(seconds_left, exit_seconds_left))
    leaving = [pod for pod in pods if pod not in kept or (pod in running and not exit_seconds_left)]
    deletions = delete_pods(leaving, view)
    wait = exit_seconds_left if running and exit_seconds_left else None
    return replace(deletions, requeue_after_seconds=soonest(seconds_left, wait, deletions.requeue_after_seconds))


def _sidecars_run(pods: list[ObservedPod]) -> str:
    plural = "s" if len(pods) > 1 else ""
    return (
        f"{_ENDED}; {pods[0].kept_by or f'pod {pods[0].name} has not terminated'}{and_more(pods)}: the operator "
        f"deletes the pod{plural} {_EXIT_SECONDS:.0f} s after the end, and the log is gone; to keep it, run "
        "sidecars as sidecar containers (initContainers with restartPolicy: Always)"
    )


# --- More steps, and resumption of a failed job ---


HOW_TO_RESUME = "The job resumes after a change of its spec; raise spec.retry if nothing else has to change."
_FIELDS_WITHOUT_EFFECT = {"suspend", "ttl_seconds_after_finished"}
"""Fields that stop or delete a job: nobody changes them to resume one."""


def _has_more_steps(view: JobView) -> bool:
    return view.holds(ConditionType.COMPLETE) and (view.status.step or 0) < view.spec.algorithm.steps


def _reopen(view: JobView, draft: StatusDraft) -> None:
    message = f"{view.status.step or 0} of {view.spec.algorithm.steps} steps are committed"
    draft.condition(ConditionType.COMPLETE, False, ConditionReason.STEPS_RAISED, message)
    draft.set(completion_time=None)
    draft.end_attempt()
    draft.event("Normal", EventReason.STEPS_RAISED, message)


def _present_spec(view: JobView) -> FailureStatus:
    """Return the record of the present spec, with which a later spec is compared."""
    return FailureStatus(generation=view.observed.generation, spec_digest=_digest(view.job.spec))


def _spec_has_changed(view: JobView) -> bool:
    """The job has failed, and its spec has changed since.

    A person has to act after a failure, and every message about one names what to change: a setting of the memory, a
    limit of the recovery, a template, the deadline. Instead of a list of changes for each failure, every change of the
    spec counts, except for fields that cannot affect an attempt. After a failure whose cause was outside the spec,
    `spec.retry` is changed.
    """
    failure = view.status.failure
    if failure is None or not view.holds(ConditionType.FAILED):
        return False
    # The generation too: other defaults of a new version of the operator change the digest.
    return view.observed.generation > failure.generation and _digest(view.job.spec) != failure.spec_digest


def resumption_message(view: JobView, draft: StatusDraft) -> str:
    """Return `the job resumes at step 4`. After the last step, only what follows it is missing, such as the model."""
    step, steps = draft.status.step or 0, view.spec.algorithm.steps
    return f"the job resumes at step {step + 1}" if step < steps else f"the job resumes after step {step}, its last one"


def _resume(view: JobView, draft: StatusDraft) -> None:
    """Clear the failure. The record of attempts stays; budgets and delays start afresh."""
    message = (
        f"the spec was changed after the failure (generation {view.observed.generation}): "
        f"{resumption_message(view, draft)}"
    )
    draft.end_attempt()
    draft.condition(ConditionType.FAILED, False, ConditionReason.RESUMED, message)
    draft.reset(ConditionType.RECOVERING)
    draft.set(
        completion_time=None,
        failure=None,
        adjustments=0,
        restarts=0,
        resumed_from_attempt=draft.attempt.number + 1 if draft.attempt else 1,
    )
    draft.event("Normal", EventReason.RESUMED, message)


def _digest(spec: RLJobSpec) -> str:
    fields = spec.model_dump(mode="json", by_alias=True, exclude=_FIELDS_WITHOUT_EFFECT, exclude_defaults=True)
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
