"""The end of an attempt in the status, and the answer of the recovery engine."""

from __future__ import annotations

from dataclasses import replace

from rljob_api.conditions import AttemptReason, ConditionReason, ConditionType
from rljob_memory.recovery import Changed, GiveUp, Restart, respond
from rljob_operator.reconcile.desired import Desired
from rljob_operator.reconcile.memory_recovery import (
    constraints_of,
    failure_report,
    record_answer,
    record_failure,
    recovery_state,
)
from rljob_operator.reconcile.restarts import (
    MAX_UNCOUNTED_WITHOUT_PROGRESS,
    REQUESTED,
    counted_attempts,
    uncounted_without_progress,
)
from rljob_operator.reconcile.resumption import HOW_TO_RESUME, failed_spec
from rljob_operator.reconcile.status_draft import EventReason, StatusDraft, clipped
from rljob_operator.reconcile.verdict import AttemptResult, Complete, Failed, NotCounted
from rljob_operator.reconcile.view import JobView

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


def fail(sentence: str, reason: ConditionReason, draft: StatusDraft, view: JobView) -> Desired:
    """The job has failed. Its pods go in the next round, in their order."""
    draft.condition(
        ConditionType.FAILED, True, reason, f"{sentence}{'' if sentence.endswith('.') else '.'} {HOW_TO_RESUME}"
    )
    draft.set(failure=failed_spec(view))
    draft.condition(ConditionType.RECOVERING, False, ConditionReason.GIVEN_UP, "the job has failed")
    draft.event("Warning", EventReason.JOB_FAILED, f"{reason.value}: {sentence}")
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
