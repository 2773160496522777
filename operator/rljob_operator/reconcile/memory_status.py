"""The memory plan, its changes and the memory conditions, as the trainer reports them."""

from __future__ import annotations

from collections.abc import Sequence

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_api.plan_change import PlanChange
from rljob_memory.recovery import messages
from rljob_memory.recovery.state import latest_answer
from rljob_operator.objects.predicted_memory import low_memory_limit
from rljob_operator.reconcile.memory_recovery import record_state, record_trainers_failure, recovery_state
from rljob_operator.reconcile.status_draft import EventReason, StatusDraft
from rljob_operator.reconcile.timing import elapsed_seconds
from rljob_operator.reconcile.view import JobView


def record_plan(view: JobView, draft: StatusDraft) -> None:
    """Record the reported plan if it is newer than the one in force, the changes that led to it, and all effects."""
    report, before = view.report, draft.status.plan_changes
    if report is not None:
        state = recovery_state(draft, view).merge(report.plan, report.plan_changes)
        record_state(state, draft)
        for change in state.changes[len(before) :]:
            if not change.preventive:
                record_trainers_failure(change, draft)
            draft.event("Normal", EventReason.PLAN_CHANGED, messages.changed_message(change))
        _record_effects_in_attempts(draft)
    _notice_recovery(view, draft)
    _report_recovered(before, draft)


def _record_effects_in_attempts(draft: StatusDraft) -> None:
    remedies = {change.attempt: change.remedy for change in draft.status.plan_changes}
    draft.set(
        attempts=[
            attempt.model_copy(update={"remedy": remedies[attempt.number]})
            if attempt.remedy and attempt.number in remedies
            else attempt
            for attempt in draft.status.attempts
        ]
    )


def _notice_recovery(view: JobView, draft: StatusDraft) -> None:
    """The latest change has helped once the failed step is committed. A trainer that reports no steps has recovered
    when its pods run again."""
    latest = latest_answer(draft.status.plan_changes)
    if latest is None:
        return
    runs_again = not view.own_trainer and view.attempt is not None and view.attempt.number > latest.attempt
    helped = (draft.status.step or 0) >= latest.step or (runs_again and view.all_ready)
    if latest.seconds_to_recover is None and helped:
        recovered = latest.model_copy(update={"seconds_to_recover": elapsed_seconds(latest.time, view.now)})
        record_state(recovery_state(draft, view).with_effect(recovered), draft)


def _report_recovered(before: Sequence[PlanChange], draft: StatusDraft) -> None:
    reported = {change.generation for change in before if change.seconds_to_recover is not None}
    for change in draft.status.plan_changes:
        if change.seconds_to_recover is not None and change.generation not in reported and not change.preventive:
            draft.event("Normal", EventReason.RECOVERED, messages.recovered_message(change))


def set_recovering_condition(view: JobView, draft: StatusDraft) -> None:
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


def set_memory_pressure_condition(view: JobView, draft: StatusDraft) -> None:
    """MemoryPressure is true as long as the trainer forecasts that memory will run out."""
    assert view.attempt is not None
    current = view.report_of_attempt
    if current is None or current.memory_pressure is None:
        draft.reset(ConditionType.MEMORY_PRESSURE)
        if low := low_memory_limit(view.spec):
            draft.condition(ConditionType.MEMORY_PRESSURE, False, ConditionReason.LIMIT_BELOW_PREDICTION, low)
        return
    sentence = messages.pressure_message(current.memory_pressure)
    if not draft.held(ConditionType.MEMORY_PRESSURE):
        draft.event("Warning", EventReason.MEMORY_PRESSURE, sentence)
    draft.condition(ConditionType.MEMORY_PRESSURE, True, ConditionReason.MEMORY_RUNNING_OUT, sentence)
