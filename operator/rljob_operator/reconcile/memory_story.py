"""How a running attempt fares with its memory, told by the conditions Recovering and MemoryPressure."""

from __future__ import annotations

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_memory.recovery.sentences import pressure_sentence, recovered_sentence
from rljob_operator.reconcile.event_reasons import EventReason
from rljob_operator.reconcile.memory_recovery import latest_answer
from rljob_operator.reconcile.recovery_story import plan_changed_sentence
from rljob_operator.reconcile.status_draft import StatusDraft
from rljob_operator.reconcile.view import JobView


def tell_recovery(view: JobView, draft: StatusDraft) -> None:
    """The trainer recovers by itself, in the same attempt: from its change of the plan until the failed step is done.

    An attempt that began after a failure tells its recovery by starting.
    """
    latest = latest_answer(draft.status.plan_changes)
    if latest is None or view.attempt is None or latest.attempt != view.attempt.number:
        return
    if latest.seconds_to_recover is None:
        message = f"{latest.diagnosis.class_name}: {latest.diagnosis.message}; {plan_changed_sentence(latest)}"
        draft.condition(ConditionType.RECOVERING, True, ConditionReason.MEMORY_PLAN_CHANGED, message)
    elif draft.holds(ConditionType.RECOVERING):
        message = recovered_sentence(latest)
        draft.condition(ConditionType.RECOVERING, False, ConditionReason.RECOVERED, message)


def tell_pressure(view: JobView, draft: StatusDraft) -> None:
    """Whether memory will run out, as the trainer forecasts it."""
    assert view.attempt is not None
    current = view.report_of_attempt
    if current is None or current.memory_pressure is None:
        draft.reset(ConditionType.MEMORY_PRESSURE)
        return
    sentence = pressure_sentence(current.memory_pressure)
    if not draft.held(ConditionType.MEMORY_PRESSURE):
        draft.event("Warning", EventReason.MEMORY_PRESSURE, sentence)
    draft.condition(ConditionType.MEMORY_PRESSURE, True, ConditionReason.MEMORY_RUNNING_OUT, sentence)
