"""An attempt that has a reason to end: its pods go in their order, or go on in the next one, and its end is written."""

from __future__ import annotations

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_operator.reconcile.desired import Desired
from rljob_operator.reconcile.ending import conclude
from rljob_operator.reconcile.failures import how_it_ended
from rljob_operator.reconcile.next_attempt import next_attempt
from rljob_operator.reconcile.restart_in_place import go_on_in_place
from rljob_operator.reconcile.status_draft import StatusDraft
from rljob_operator.reconcile.teardown import next_deletions
from rljob_operator.reconcile.verdict import Complete
from rljob_operator.reconcile.view import JobView


def stop_attempt(view: JobView, draft: StatusDraft) -> Desired:
    """Steps that are committed while the pods stop count; where they were the last ones, the job is complete."""
    end = how_it_ended(view)
    if end is not None and isinstance(end.verdict, Complete):
        return conclude(end, draft, view)
    assert view.attempt is not None
    controller = view.controller
    if view.attempt.exit_code is None and controller and controller.end:
        draft.change_attempt(exit_code=controller.end.exit_code, to_step=draft.status.step)
    if in_place := go_on_in_place(view, draft):
        return in_place
    if view.observed.pods:
        return Desired(delete_pods=next_deletions(view.observed.pods, view.missing))
    draft.change_attempt(end_time=view.now, to_step=draft.status.step)
    for type_ in (ConditionType.SCHEDULED, ConditionType.RUNNING):
        draft.condition(
            type_, False, ConditionReason.PODS_TERMINATED, f"the pods of attempt {view.attempt.number} have gone"
        )
    return next_attempt(view, draft)
