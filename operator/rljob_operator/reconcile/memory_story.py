"""The conditions Recovering and MemoryPressure of a running attempt."""

from __future__ import annotations

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_memory.recovery import messages
from rljob_memory.recovery.state import latest_answer
from rljob_operator.reconcile.event_reasons import EventReason
from rljob_operator.reconcile.status_draft import StatusDraft
from rljob_operator.reconcile.view import JobView


def tell_recovery(view: JobView, draft: StatusDraft) -> None:
    """Recovering is true from a change of the plan that the trainer made itself until the failed step is committed.

    An attempt that began after a failure reports its recovery by starting.
    """
    latest = latest_answer(draft.status.plan_changes)
    if latest is None or view.attempt is None or latest.attempt != view.attempt.number:
        return
    if latest.seconds_to_recover is None:
        message = messages.recovering_message(latest)
        draft.condition(ConditionType.RECOVERING, True, ConditionReason.MEMORY_PLAN_CHANGED, message)
    elif draft.holds(ConditionType.RECOVERING):
        message = messages.recovered_message(latest)
        draft.condition(ConditionType.RECOVERING, False, ConditionReason.RECOVERED, message)


def tell_pressure(view: JobView, draft: StatusDraft) -> None:
    """MemoryPressure is true as long as the trainer forecasts that memory will run out."""
    assert view.attempt is not None
    current = view.report_of_attempt
    if current is None or current.memory_pressure is None:
        draft.reset(ConditionType.MEMORY_PRESSURE)
        return
    sentence = messages.pressure_message(current.memory_pressure)
    if not draft.held(ConditionType.MEMORY_PRESSURE):
        draft.event("Warning", EventReason.MEMORY_PRESSURE, sentence)
    draft.condition(ConditionType.MEMORY_PRESSURE, True, ConditionReason.MEMORY_RUNNING_OUT, sentence)
