"""Changes of the memory plan that the trainer made by itself, and what became of all changes.

The trainer writes a change down before it acts on it, and goes on; the operator catches up from the StepReport.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import PlanChange
from rljob_api.status import OutOfMemoryStatus
from rljob_memory.recovery.sentences import recovered_sentence
from rljob_operator.reconcile.event_reasons import EventReason
from rljob_operator.reconcile.memory_recovery import add_change, history_so_far, latest_answer
from rljob_operator.reconcile.recovery_story import out_of_memory_sentence, plan_changed_sentence
from rljob_operator.reconcile.status_draft import StatusDraft
from rljob_operator.reconcile.timing import elapsed_seconds
from rljob_operator.reconcile.view import JobView

_SET_ON_PODS: dict[str, Any] = {
    "host_memory_bytes": None,
    "controller_host_memory_bytes": None,
    "shared_memory_bytes": None,
    "excluded_nodes": [],
}
"""Settings that the operator puts into effect, as they are at first: the pods run the user's code, and do not say what
they are given."""


def record_plan(view: JobView, draft: StatusDraft) -> None:
    """The plan that the trainer reports, where it is newer than the one in force, and the changes that led to it."""
    report, before = view.report, draft.status.plan_changes
    if report is not None and report.plan is not None:
        known = draft.status.plan.generation if draft.status.plan else 0
        if report.plan.generation > known:
            # One a generation, whatever the pods say: the status is refused otherwise.
            new = {c.generation: c for c in report.plan_changes if known < c.generation <= report.plan.generation}
            _take_over(report.plan, [new[generation] for generation in sorted(new)], draft, view)
        _learn_effects(report.plan_changes, draft)
    _notice_recovery(view, draft)
    _tell_recovered(before, draft)


def _take_over(plan: MemoryPlan, changes: Sequence[PlanChange], draft: StatusDraft, view: JobView) -> None:
    kept = draft.status.plan
    draft.set(plan=plan.model_copy(update={name: getattr(kept, name, first) for name, first in _SET_ON_PODS.items()}))
    for change in changes:
        add_change(change, replace(history_so_far(draft), committed_step=change.step - 1), draft, view)
        if not change.preventive:
            _tell_failure(change, draft)
        draft.event("Normal", EventReason.PLAN_CHANGED, plan_changed_sentence(change))


def _tell_failure(change: PlanChange, draft: StatusDraft) -> None:
    draft.set(last_out_of_memory=OutOfMemoryStatus(time=change.time, step=change.step, diagnosis=change.diagnosis))
    sentence = out_of_memory_sentence(change.role, change.rank, change.phase, change.step, change.diagnosis)
    draft.event("Warning", EventReason.OUT_OF_MEMORY, sentence)


def _learn_effects(reported: Sequence[PlanChange], draft: StatusDraft) -> None:
    """What a change freed and how long it took: nothing else of a change that is known already is taken over."""
    # Both may have made a change of one generation, neither knowing of the other's.
    same = {(change.generation, change.remedy.setting): change for change in reported}
    draft.set(
        plan_changes=[
            _with_effect(change, same.get((change.generation, change.remedy.setting), change))
            for change in draft.status.plan_changes
        ]
    )
    remedies = {change.attempt: change.remedy for change in draft.status.plan_changes}
    draft.set(
        attempts=[
            attempt.model_copy(update={"remedy": remedies[attempt.number]})
            if attempt.remedy and attempt.number in remedies
            else attempt
            for attempt in draft.status.attempts
        ]
    )


def _with_effect(change: PlanChange, reported: PlanChange) -> PlanChange:
    remedy = change.remedy
    if remedy.observed_bytes is None and reported.remedy.observed_bytes is not None:
        remedy = remedy.model_copy(update={"observed_bytes": reported.remedy.observed_bytes})
    seconds = reported.seconds_to_recover if change.seconds_to_recover is None else change.seconds_to_recover
    return change.model_copy(update={"remedy": remedy, "seconds_to_recover": seconds})


def _notice_recovery(view: JobView, draft: StatusDraft) -> None:
    """The latest change has helped once the step that failed is committed. A trainer that reports no steps has
    recovered when its pods run again."""
    latest = latest_answer(draft.status.plan_changes)
    if latest is None:
        return
    runs_again = not view.own_trainer and view.attempt is not None and view.attempt.number > latest.attempt
    helped = (draft.status.step or 0) >= latest.step or (runs_again and view.all_ready)
    if latest.seconds_to_recover is None and helped:
        recovered = latest.model_copy(update={"seconds_to_recover": elapsed_seconds(latest.time, view.now)})
        changes = draft.status.plan_changes
        draft.set(plan_changes=[recovered if change is latest else change for change in changes])


def _tell_recovered(before: Sequence[PlanChange], draft: StatusDraft) -> None:
    told = {change.generation for change in before if change.seconds_to_recover is not None}
    for change in draft.status.plan_changes:
        if change.seconds_to_recover is not None and change.generation not in told and not change.preventive:
            draft.event("Normal", EventReason.RECOVERED, recovered_sentence(change))
