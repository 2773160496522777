"""What is written down when an attempt ends, or has to."""

from __future__ import annotations

from dataclasses import replace

from rljob_api.conditions import AttemptReason, ConditionReason, ConditionType
from rljob_memory import recovery
from rljob_operator.reconcile.desired import Desired
from rljob_operator.reconcile.event_reasons import EventReason
from rljob_operator.reconcile.memory_recovery import adopt, answer_to, note_failure
from rljob_operator.reconcile.restarts import ASKED_FOR, account_of_restarts, restarts_left_standing
from rljob_operator.reconcile.status_draft import StatusDraft, clipped
from rljob_operator.reconcile.verdict import AttemptEnd, Complete, GiveUp, NotCounted, OutOfMemory, Restart
from rljob_operator.reconcile.view import JobView

_LONGEST_ATTEMPT_MESSAGE = 1024
_CHANGED = ConditionReason.MEMORY_PLAN_CHANGED
_GIVEN_UP = {
    recovery.GiveUpReason.ADJUSTMENTS_EXHAUSTED: ConditionReason.ADJUSTMENTS_EXHAUSTED,
    recovery.GiveUpReason.PINNED_SETTING_CONFLICT: ConditionReason.PINNED_SETTING_CONFLICT,
    recovery.GiveUpReason.NO_PROGRESS: ConditionReason.NO_PROGRESS,
}


def conclude(end: AttemptEnd, draft: StatusDraft, view: JobView) -> Desired:
    """Write the end into the record of the attempt, and what follows into the conditions. Pods are touched later."""
    draft.change_attempt(
        reason=end.reason.value,
        message=_clipped(end),
        exit_code=None if end.exit_code is None else int(end.exit_code),
        to_step=draft.status.step,
    )
    match end.verdict:
        case Complete():
            return _complete(draft, view)
        case GiveUp(reason):
            return fail(end.message, reason, draft, view)
        case Restart():
            return _restart(end, draft, view)
        case OutOfMemory() as failure:
            return _recover(end, failure, draft, view)
        case NotCounted():
            _forgive(draft, view)
            return _go_on(end, ConditionReason.PODS_DISRUPTED, draft)


def fail(sentence: str, reason: ConditionReason, draft: StatusDraft, view: JobView) -> Desired:
    """The job has failed. Its pods go in the next round, in their order."""
    draft.condition(ConditionType.FAILED, True, reason, sentence)
    draft.condition(ConditionType.RECOVERING, False, ConditionReason.GIVEN_UP, "the job has failed")
    draft.event("Warning", EventReason.JOB_FAILED, f"{reason.value}: {sentence}")
    return _finished(draft, view)


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


def _recover(end: AttemptEnd, failure: OutOfMemory, draft: StatusDraft, view: JobView) -> Desired:
    """Under a changed plan where one is left that may help. Where none is left, the same plan may still do: memory runs
    out for causes outside the job too, so what remains are the restarts."""
    note_failure(failure.evidence, draft)
    match answer_to(failure, draft, view):
        case None:
            return _restart(_with_advice(end, failure.advice), draft, view)
        case recovery.GiveUp(reason=reason, sentence=account) if reason in _GIVEN_UP:
            return fail(account, _GIVEN_UP[reason], draft, view)
        case recovery.GiveUp(sentence=account):
            return _restart(_with_advice(end, account), draft, view)
        case recovery.Remedy() as remedy:
            _forgive(draft, view)
            adopt(remedy, failure.evidence, draft, view)
            return _go_on(replace(end, message=_adjustment(remedy, draft, view)), _CHANGED, draft)


def _restart(end: AttemptEnd, draft: StatusDraft, view: JobView) -> Desired:
    allowed = view.spec.recovery.max_restarts
    _forgive(draft, view)
    draft.change_attempt(message=_clipped(end))
    if draft.status.restarts >= allowed:
        account = account_of_restarts(end.message, draft.status.attempts, allowed)
        return fail(account, ConditionReason.RESTARTS_EXHAUSTED, draft, view)
    restarts = draft.status.restarts + 1
    draft.set(restarts=restarts)
    told = replace(end, message=f"{end.message} (restart {restarts} of {allowed})")
    return _go_on(told, ConditionReason.SAME_PLAN_RESTART, draft)


def _clipped(end: AttemptEnd) -> str:
    return clipped(end.message, _LONGEST_ATTEMPT_MESSAGE)


def _with_advice(end: AttemptEnd, advice: str) -> AttemptEnd:
    return replace(end, message=f"{end.message.rstrip('. ')}; {advice}") if advice else end


def _adjustment(remedy: recovery.Remedy, draft: StatusDraft, view: JobView) -> str:
    counted = f"(adjustment {draft.status.adjustments} of {view.spec.recovery.max_adjustments})"
    return f"{remedy.diagnosis.class_name}: {remedy.diagnosis.message.rstrip('. ')}; {remedy.sentence} {counted}"


def _forgive(draft: StatusDraft, view: JobView) -> None:
    assert draft.attempt is not None
    steps = view.spec.algorithm.steps
    draft.set(restarts=restarts_left_standing(draft.status.restarts, draft.attempt, steps))


def _go_on(end: AttemptEnd, reason: ConditionReason, draft: StatusDraft) -> Desired:
    """Another attempt follows when the pods of this one have gone."""
    draft.set(pods=[])
    draft.condition(ConditionType.RUNNING, False, ConditionReason.STOPPING, end.message)
    draft.reset(ConditionType.MEMORY_PRESSURE)
    if end.reason == AttemptReason.PLACEMENT_TIMED_OUT:
        draft.condition(ConditionType.SCHEDULED, False, ConditionReason.PLACEMENT_TIMED_OUT, end.message)
        draft.event("Warning", EventReason.PLACEMENT_TIMED_OUT, end.message)
    elif end.reason not in ASKED_FOR:
        draft.condition(ConditionType.RECOVERING, True, reason, end.message)
        if reason != _CHANGED:  # that has been told, as OutOfMemory and PlanChanged
            draft.event("Warning", EventReason.RESTARTING, f"{end.reason.value}: {end.message}")
    return Desired()
