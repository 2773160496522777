"""A live attempt: its pods are made, watched while they find nodes and start, and judged when one of them ends."""

from __future__ import annotations

from dataclasses import replace

from rljob_api.conditions import AttemptReason, ConditionReason, ConditionType
from rljob_operator.reconcile.creation import build, create_missing, strangers
from rljob_operator.reconcile.deadline import deadline_exceeded, deadline_seconds_left
from rljob_operator.reconcile.desired import Desired
from rljob_operator.reconcile.ending import conclude
from rljob_operator.reconcile.event_reasons import EventReason
from rljob_operator.reconcile.failures import how_it_ended, seconds_until_clear
from rljob_operator.reconcile.gang import half_placed_seconds_left, half_placed_too_long
from rljob_operator.reconcile.invalid_spec import tell_invalid
from rljob_operator.reconcile.memory_story import tell_pressure, tell_recovery
from rljob_operator.reconcile.overdue import overdue_seconds_left
from rljob_operator.reconcile.refusal import refusal
from rljob_operator.reconcile.restart_in_place import restart_seconds_left
from rljob_operator.reconcile.start_story import settling_seconds_left, tell_placement, tell_start
from rljob_operator.reconcile.starting import cannot_start, start_seconds_left
from rljob_operator.reconcile.status_draft import StatusDraft
from rljob_operator.reconcile.teardown import next_deletions
from rljob_operator.reconcile.timing import elapsed_seconds, soonest
from rljob_operator.reconcile.verdict import AttemptEnd, NotCounted
from rljob_operator.reconcile.view import JobView, condition_of

_RETRY_REFUSED_SECONDS = 30.0


def run_attempt(view: JobView, draft: StatusDraft) -> Desired:
    if view.leftovers:
        return Desired(delete_pods=next_deletions(view.leftovers))
    if end := how_it_ended(view) or _reason_to_stop(view):
        return conclude(end, draft, view)
    tell_placement(view, draft)
    tell_start(view, draft)
    tell_recovery(view, draft)
    tell_pressure(view, draft)
    desired = _complete_the_pods(view, draft) if view.missing else Desired()
    return replace(
        desired,
        look_again_after_seconds=soonest(
            desired.look_again_after_seconds,
            deadline_seconds_left(view),
            half_placed_seconds_left(view),
            start_seconds_left(view),
            overdue_seconds_left(view),
            settling_seconds_left(view),
            seconds_until_clear(view),
            restart_seconds_left(view),
        ),
    )


def _reason_to_stop(view: JobView) -> AttemptEnd | None:
    """Why the attempt must end although its pods would go on."""
    if view.spec.suspend:
        return AttemptEnd(AttemptReason.SUSPEND_REQUESTED, "spec.suspend is true", NotCounted())
    return deadline_exceeded(view) or cannot_start(view) or half_placed_too_long(view)


def _complete_the_pods(view: JobView, draft: StatusDraft) -> Desired:
    """Create what is missing, unless somebody refuses it: then say so, and try again after a while."""
    if refused := refusal(view):
        draft.condition(ConditionType.SCHEDULED, False, *refused)
        if wait := _seconds_until_retry(view, refused[0]):
            return Desired(look_again_after_seconds=wait)
    assert view.attempt is not None
    objects = build(view, view.attempt.number)
    if isinstance(objects, str):
        return tell_invalid(objects, draft)
    if ignored := strangers(view):
        sentence = f"not pods of this job, though they have its labels: {', '.join(ignored)}"
        draft.event("Warning", EventReason.FOREIGN_POD_IGNORED, sentence)
    desired = create_missing(objects, view)
    return replace(desired, look_again_after_seconds=_RETRY_REFUSED_SECONDS) if refused else desired


def _seconds_until_retry(view: JobView, reason: ConditionReason) -> float:
    """The condition is written first; the next try comes when it has stood for a while."""
    if reason == ConditionReason.NAMESPACE_TERMINATING:
        return _RETRY_REFUSED_SECONDS
    told = condition_of(view.status, ConditionType.SCHEDULED)
    if told is None or told.reason != reason or view.status.update_time is None:
        return _RETRY_REFUSED_SECONDS
    return max(0.0, _RETRY_REFUSED_SECONDS - elapsed_seconds(view.status.update_time, view.now))
