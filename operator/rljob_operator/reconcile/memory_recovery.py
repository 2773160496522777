"""After an out-of-memory failure: what is asked of the ladder, and how its answer is written down.

The changed plan is in the status before anything acts on it; the pods of the next attempt are made from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rljob_api.plan_change import MAX_PLAN_CHANGES_KEPT, PlanChange, RemedyLevel
from rljob_api.status import OutOfMemoryStatus
from rljob_api.step_report import Evidence
from rljob_memory.recovery import (
    GiveUp,
    History,
    Latitude,
    Remedy,
    adjustments_left_standing,
    decide,
    with_change,
)
from rljob_operator.reconcile.event_reasons import EventReason
from rljob_operator.reconcile.observed import ObservedPod
from rljob_operator.reconcile.other_nodes import can_leave
from rljob_operator.reconcile.recovery_story import out_of_memory_sentence, plan_changed_sentence
from rljob_operator.reconcile.restart_in_place import can_restart_in_place
from rljob_operator.reconcile.status_draft import StatusDraft
from rljob_operator.reconcile.verdict import OutOfMemory
from rljob_operator.reconcile.view import JobView

_REPLACED: frozenset[RemedyLevel] = frozenset({"ReplacePods"})


def note_failure(evidence: Evidence, draft: StatusDraft) -> None:
    """Write down what ran out of memory, and why."""
    cause = evidence.diagnoses[0]
    draft.change_attempt(diagnosis=cause)
    draft.set(last_out_of_memory=OutOfMemoryStatus(time=evidence.time, step=evidence.step, diagnosis=cause))
    sentence = out_of_memory_sentence(evidence.role, evidence.rank, evidence.phase, evidence.step, cause)
    draft.event("Warning", EventReason.OUT_OF_MEMORY, sentence)


def answer_to(failure: OutOfMemory, draft: StatusDraft, view: JobView) -> Remedy | GiveUp | None:
    """What the ladder says; None where the plan is not to be changed, or is not there yet."""
    plan = draft.status.plan
    if plan is None or view.spec.memory.mode == "Disabled":
        return None
    history = history_so_far(draft)
    standing = adjustments_left_standing(history, view.spec.algorithm.steps)
    return decide(failure.evidence, plan, replace(history, adjustments=standing), _latitude(failure, view))


def adopt(remedy: Remedy, evidence: Evidence, draft: StatusDraft, view: JobView) -> None:
    """Make the remedy's plan the one in force."""
    change = PlanChange(
        generation=remedy.plan.generation,
        time=view.now,
        attempt=evidence.attempt,
        step=evidence.step,
        phase=evidence.phase,
        role=evidence.role,
        rank=evidence.rank,
        diagnosis=remedy.diagnosis,
        remedy=remedy.status,
        level=remedy.level,
    )
    draft.change_attempt(diagnosis=remedy.diagnosis, remedy=remedy.status)
    draft.set(plan=remedy.plan)
    add_change(change, history_so_far(draft), draft, view)
    draft.event("Normal", EventReason.PLAN_CHANGED, plan_changed_sentence(change))


def history_so_far(draft: StatusDraft) -> History:
    return History(
        changes=tuple(draft.status.plan_changes),
        adjustments=draft.status.adjustments,
        committed_step=draft.status.step or 0,
    )


def add_change(change: PlanChange, history: History, draft: StatusDraft, view: JobView) -> None:
    """Write `change` down, and count it."""
    grown = with_change(history, change, view.spec.algorithm.steps)
    draft.set(plan_changes=list(grown.changes[-MAX_PLAN_CHANGES_KEPT:]), adjustments=grown.adjustments)


def latest_answer(changes: Sequence[PlanChange]) -> PlanChange | None:
    """The latest change that answers a failure; what was changed on an early warning answers none."""
    return next((change for change in reversed(changes) if not change.preventive), None)


def _latitude(failure: OutOfMemory, view: JobView) -> Latitude:
    return Latitude(
        settings=view.spec.memory,
        recovery=view.spec.recovery,
        facts=view.report.memory_profile if view.report else None,
        levels=_REPLACED | {"RestartInPlace"} if can_restart_in_place(view) else _REPLACED,
        supported_settings=None if view.spec.trainer is None else frozenset(view.spec.trainer.supported_settings),
        host_memory_limit_bytes=failure.pod.memory_limit_bytes,
        shared_memory_bytes=failure.pod.shared_memory_bytes,
        node=_node_to_leave(failure.pod, view),
    )


def _node_to_leave(pod: ObservedPod, view: JobView) -> str | None:
    """The plan keeps workers off nodes, and no controller."""
    leaves = pod.role != "controller" and pod.node is not None and can_leave(pod.node, view)
    return pod.node if leaves else None
