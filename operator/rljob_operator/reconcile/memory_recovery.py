"""The recovery engine's view of a job, and its answers in the status.

A changed plan is in the status before anything acts on it; the pods of the next attempt are made from there.
"""

from __future__ import annotations

from rljob_api.plan_change import MAX_PLAN_CHANGES_KEPT, DiagnosisStatus, PlanChange, RemedyLevel
from rljob_api.status import OutOfMemoryStatus
from rljob_memory.recovery import Changed, Constraints, FailureReport, RecoveryState, messages
from rljob_memory.recovery.constraints import policy_growth
from rljob_operator.objects.predicted_memory import predicted_limit_bytes
from rljob_operator.reconcile.observed import ObservedPod
from rljob_operator.reconcile.placement import can_avoid
from rljob_operator.reconcile.restart_in_place import can_restart_in_place
from rljob_operator.reconcile.restarts import REQUESTED, counted_attempts
from rljob_operator.reconcile.status_draft import EventReason, StatusDraft
from rljob_operator.reconcile.verdict import AttemptResult, Failed
from rljob_operator.reconcile.view import JobView

_REPLACED: frozenset[RemedyLevel] = frozenset({"ReplacePods"})

# --- what the engine is given ---


def failure_report(end: AttemptResult, failure: Failed, draft: StatusDraft, view: JobView) -> FailureReport:
    *earlier, latest = counted_attempts(draft.status)
    return FailureReport(
        message=end.message,
        attempt=latest.number,
        time=view.now,
        evidence=failure.evidence,
        final=failure.final,
        advice=failure.advice,
        earlier_failures=tuple(
            f"{attempt.number}: {attempt.reason}" for attempt in earlier if attempt.reason not in REQUESTED
        ),
    )


def recovery_state(draft: StatusDraft, view: JobView) -> RecoveryState:
    status = draft.status
    return RecoveryState(
        plan=status.plan,
        steps=view.spec.algorithm.steps,
        changes=tuple(status.plan_changes),
        adjustments=status.adjustments,
        restarts=status.restarts,
        committed_step=status.step or 0,
        first_step=draft.attempt.from_step if draft.attempt else 1,
        first_attempt=status.resumed_from_attempt or 1,
    )


def constraints_of(pod: ObservedPod | None, view: JobView) -> Constraints:
    """`pod`: whose memory ran out; None for every other failure."""
    trainer = view.spec.trainer
    return Constraints(
        settings=view.spec.memory,
        recovery=view.spec.recovery,
        profile=view.memory_profile,
        levels=_REPLACED | {"RestartInPlace"} if can_restart_in_place(view) else _REPLACED,
        supported_settings=None if trainer is None else trainer.changeable_settings,
        without_gpus=trainer is not None and view.spec.policy.gpus_per_replica == 0,
        host_memory_limit_bytes=pod.memory_limit_bytes if pod else None,
        predicted_host_memory_limit_bytes=predicted_limit_bytes(view.spec, pod.role) if pod else None,
        shared_memory_bytes=pod.shared_memory_bytes if pod else None,
        node=_node_to_leave(pod, view) if pod else None,
        growth=policy_growth(view.spec, "ReplacePods"),
    )


def _node_to_leave(pod: ObservedPod, view: JobView) -> str | None:
    """The plan keeps workers off nodes, and no controller."""
    leaves = pod.role != "controller" and pod.node is not None and can_avoid(pod.node, view)
    return pod.node if leaves else None


# --- what the status records ---


def record_failure(failure: Failed, draft: StatusDraft) -> None:
    """Record an out-of-memory failure and its cause."""
    if (evidence := failure.evidence) is None:
        return
    cause = evidence.diagnoses[0]
    draft.change_attempt(diagnosis=cause)
    draft.set(last_out_of_memory=OutOfMemoryStatus(time=evidence.time, step=evidence.step, diagnosis=cause))
    message = messages.out_of_memory_message(evidence.role, evidence.rank, evidence.phase, evidence.step, cause)
    draft.event("Warning", EventReason.OUT_OF_MEMORY, message)


def record_answer(answer: Changed, draft: StatusDraft) -> None:
    """Put the changed plan into force."""
    draft.change_attempt(diagnosis=answer.change.diagnosis, remedy=answer.change.remedy)
    record_state(answer.state, draft)
    draft.event("Normal", EventReason.PLAN_CHANGED, messages.changed_message(answer.change))


def record_state(state: RecoveryState, draft: StatusDraft) -> None:
    """Record the plan, its changes and their count."""
    changes = list(state.changes[-MAX_PLAN_CHANGES_KEPT:])
    draft.set(plan=state.plan, plan_changes=changes, adjustments=state.adjustments)


def record_trainers_failure(change: PlanChange, draft: StatusDraft) -> None:
    """Record an out-of-memory failure that the trainer has answered itself, by `change`."""
    cause: DiagnosisStatus = change.diagnosis
    draft.set(last_out_of_memory=OutOfMemoryStatus(time=change.time, step=change.step, diagnosis=cause))
    message = messages.out_of_memory_message(change.role, change.rank, change.phase, change.step, cause)
    draft.event("Warning", EventReason.OUT_OF_MEMORY, message)
