"""Out-of-memory failures: their evidence, the input of the recovery engine, and its answers in the status.

A changed plan is in the status before anything acts on it; the pods of the next attempt are made from there.
"""

from __future__ import annotations

from rljob_api.exit_codes import ExitCode
from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import MAX_PLAN_CHANGES_KEPT, DiagnosisStatus, PlanChange
from rljob_api.quantity import byte_quantity
from rljob_api.status import OutOfMemoryStatus, Role
from rljob_api.step_report import Evidence
from rljob_memory.budget import setup_of
from rljob_memory.diagnosis import FailureClass, diagnosed
from rljob_memory.recovery import Changed, Constraints, FailureReport, RecoveryState, messages, more_host_memory
from rljob_memory.recovery.constraints import policy_growth
from rljob_memory.recovery.state import latest_answer
from rljob_operator.events import EventReason
from rljob_operator.objects.pod_layout import predicted_limit_bytes
from rljob_operator.reconcile.desired import AttemptFailure, AttemptResult
from rljob_operator.reconcile.observed import ContainerTermination, ObservedPod
from rljob_operator.reconcile.placement import can_avoid
from rljob_operator.reconcile.pods import can_restart_in_place
from rljob_operator.reconcile.status import StatusDraft
from rljob_operator.reconcile.timers import REQUESTED, counted_attempts
from rljob_operator.reconcile.view import JobView, clip_times, elapsed_seconds, possible_times

# --- Input of the recovery engine ---


def failure_report(end: AttemptResult, failure: AttemptFailure, draft: StatusDraft, view: JobView) -> FailureReport:
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
    """`pod`: the pod that ran out of memory; None for any other failure."""
    trainer = view.spec.trainer
    # `excludedNodes` of the plan applies to workers only.
    leaves_node = pod is not None and pod.role != "controller" and pod.node is not None and can_avoid(pod.node, view)
    return Constraints(
        settings=view.spec.memory,
        recovery=view.spec.recovery,
        setup=setup_of(view.spec, view.memory_facts),
        levels=frozenset({"ReplacePods", "RestartInPlace"} if can_restart_in_place(view) else {"ReplacePods"}),
        supported_settings=None if trainer is None else trainer.changeable_settings,
        without_gpus=trainer is not None and view.spec.policy.gpus_per_replica == 0,
        host_memory_limit_bytes=pod.memory_limit_bytes if pod else None,
        predicted_host_memory_limit_bytes=predicted_limit_bytes(view.spec, pod.role) if pod else None,
        shared_memory_bytes=pod.shared_memory_bytes if pod else None,
        node=pod.node if pod and leaves_node else None,
        growth=policy_growth(view.spec, "ReplacePods"),
    )


# --- Records in the status ---


def record_failure(evidence: Evidence, draft: StatusDraft) -> None:
    """Record an out-of-memory failure that ended the attempt, and its cause."""
    cause = evidence.diagnoses[0]
    draft.change_attempt(diagnosis=cause)
    _report_out_of_memory(evidence, cause, draft)


def _report_out_of_memory(failure: Evidence | PlanChange, cause: DiagnosisStatus, draft: StatusDraft) -> None:
    draft.set(last_out_of_memory=OutOfMemoryStatus(time=failure.time, step=failure.step, diagnosis=cause))
    message = messages.out_of_memory_message(failure.role, failure.rank, failure.phase, failure.step, cause)
    draft.event("Warning", EventReason.OUT_OF_MEMORY, message)


def record_answer(answer: Changed, draft: StatusDraft) -> None:
    """Put the changed plan into force."""
    draft.change_attempt(diagnosis=answer.change.diagnosis, remedy=answer.change.remedy)
    _record_state(answer.state, draft)
    draft.event("Normal", EventReason.PLAN_CHANGED, messages.changed_message(answer.change))


def prevent_kill(view: JobView, draft: StatusDraft) -> None:
    """Raise the memory limit in the plan if a container is about to reach it. The next reconcile resizes the pods."""
    report = view.report_of_attempt
    pressure = report.memory_pressure if report else None
    if pressure is None:
        return
    place = view.layout.pod_of(pressure.role, pressure.rank)
    pod = next((pod for pod in view.pods if (pod.role, pod.index) == place), None)
    state = recovery_state(draft, view)
    plan = more_host_memory(pressure, state, constraints_of(pod, view)) if pod else None
    if plan is not None:
        draft.set(plan=plan)
        draft.event("Normal", EventReason.PLAN_CHANGED, messages.raised_limit_message(state.plan, plan, pressure))


def _record_state(state: RecoveryState, draft: StatusDraft) -> None:
    changes = list(state.changes[-MAX_PLAN_CHANGES_KEPT:])
    draft.set(plan=state.plan, plan_changes=changes, adjustments=state.adjustments)


def record_plan(view: JobView, draft: StatusDraft) -> None:
    """Record the reported plan if it is newer than the one in force, the changes that led to it, and all effects."""
    report, before = view.report, draft.status.plan_changes
    if report is not None:
        state = recovery_state(draft, view).merge(report.plan, report.plan_changes)
        _record_state(state, draft)
        for change in state.changes[len(before) :]:
            if not change.preventive:  # the trainer has answered an out-of-memory failure itself
                _report_out_of_memory(change, change.diagnosis, draft)
            draft.event("Normal", EventReason.PLAN_CHANGED, messages.changed_message(change))
        remedies = {change.attempt: change.remedy for change in draft.status.plan_changes}
        attempts = [
            attempt.model_copy(update={"remedy": remedies.get(attempt.number, attempt.remedy)})
            if attempt.remedy
            else attempt
            for attempt in draft.status.attempts
        ]
        draft.set(attempts=attempts)
    _notice_recovery(view, draft)
    known = {change.generation for change in before if change.seconds_to_recover is not None}
    for change in draft.status.plan_changes:
        if change.seconds_to_recover is not None and change.generation not in known and not change.preventive:
            draft.event("Normal", EventReason.RECOVERED, messages.recovered_message(change))


def _notice_recovery(view: JobView, draft: StatusDraft) -> None:
    """The latest change has helped once the failed step is committed. A trainer that reports no steps has recovered
    when its pods run again."""
    latest = latest_answer(draft.status.plan_changes)
    if latest is None or latest.seconds_to_recover is not None:
        return
    runs_again = not view.own_trainer and view.attempt is not None and view.attempt.number > latest.attempt
    if (draft.status.step or 0) >= latest.step or (runs_again and view.all_ready):
        recovered = latest.model_copy(update={"seconds_to_recover": elapsed_seconds(latest.time, view.now)})
        _record_state(recovery_state(draft, view).with_effect(recovered), draft)


# --- Evidence: the trainer's own, else from its pods ---


CLASS_OF_CODE = {
    ExitCode.DEVICE_OUT_OF_MEMORY: FailureClass.UNKNOWN,
    ExitCode.HOST_OUT_OF_MEMORY: FailureClass.HOST_MEMORY,
    ExitCode.SHARED_MEMORY_EXHAUSTED: FailureClass.SHARED_MEMORY,
}
"""Cause of a failure as far as its exit code shows it."""
CONFIDENCE_OF_EXIT_FACTS = 0.95
_MAX_MESSAGE_CHARACTERS = 2048


def evidence_of_exit(pod: ObservedPod, end: ContainerTermination, message: str, view: JobView) -> Evidence:
    """Return the evidence, with diagnoses, of a container that ended with an out-of-memory exit code: the trainer's, if
    it left any.

    The StepReport has it complete, the termination message at most 4,096 bytes of it.
    """
    reported = [view.report.last_evidence if view.report else None, end.message.evidence if end.message else None]
    bounds = possible_times(view.observed, view.now)
    possible = [clip_times(evidence, *bounds) for evidence in reported if evidence is not None]
    found = [evidence for evidence in possible if _is_unanswered(evidence, view)]
    class_ = CLASS_OF_CODE.get(ExitCode(end.exit_code), FailureClass.UNKNOWN)
    if not found:
        return diagnosed(_evidence_of_pod(pod, end, message, class_, view), _plan_followed(view))
    evidence = diagnosed(max(found, key=lambda one: one.time), _plan_followed(view))
    if class_ is FailureClass.UNKNOWN or any(d.class_name != FailureClass.UNKNOWN for d in evidence.diagnoses):
        return evidence
    by_code = _diagnosis(class_, evidence.message, pod_of(evidence, pod, view))
    return evidence.model_copy(update={"diagnoses": [by_code]})


def evidence_of_kill(pod: ObservedPod, end: ContainerTermination, message: str, view: JobView) -> Evidence:
    """Return the evidence of a container that the kernel killed for its memory, and that could not report anything."""
    return _evidence_of_pod(pod, end, message, FailureClass.HOST_MEMORY, view)


def pod_of(evidence: Evidence, reporter: ObservedPod, view: JobView) -> ObservedPod:
    """Return the pod whose memory ran out: that of the process in the evidence, else the pod that reported it."""
    place = view.layout.pod_of(evidence.role, evidence.rank)
    return next((pod for pod in view.pods if (pod.role, pod.index) == place), reporter)


def _plan_followed(view: JobView) -> MemoryPlan | None:
    """The plan of the failed attempt, if the trainer applies it. A diagnosis needs it to know if the engine slept."""
    trainer = view.spec.trainer
    if trainer is not None and "rolloutSleep" not in trainer.supported_settings:
        return None
    return view.status.plan or (view.report.plan if view.report else None)


def _is_unanswered(evidence: Evidence, view: JobView) -> bool:
    """The evidence belongs to the latest attempt, and no change of the plan has answered its failure."""
    changes = [*view.status.plan_changes, *(view.report.plan_changes if view.report else [])]
    answered = any(change.attempt == evidence.attempt and change.time >= evidence.time for change in changes)
    return view.attempt is not None and evidence.attempt == view.attempt.number and not answered


def _evidence_of_pod(
    pod: ObservedPod, end: ContainerTermination, message: str, class_: FailureClass, view: JobView
) -> Evidence:
    assert view.attempt is not None
    # A controller has no GPU: without further evidence, a policy rank is the likeliest.
    role: Role = "policy" if end.exit_code == ExitCode.DEVICE_OUT_OF_MEMORY and pod.role == "controller" else pod.role
    return Evidence(
        time=end.finished_at or view.now,
        attempt=view.attempt.number,
        role=role,
        rank=view.layout.first_rank(pod.role, pod.index),
        step=min((view.committed_steps or 0) + 1, view.spec.algorithm.steps),
        phase=view.report_of_attempt.phase if view.report_of_attempt else None,
        message=message,
        diagnoses=[] if class_ is FailureClass.UNKNOWN else [_diagnosis(class_, message, pod)],
    )


def _diagnosis(class_: FailureClass, message: str, pod: ObservedPod) -> DiagnosisStatus:
    limit = pod.memory_limit_bytes if class_ is FailureClass.HOST_MEMORY else None
    return DiagnosisStatus.model_validate(
        {
            "class": class_.value,
            "confidence": CONFIDENCE_OF_EXIT_FACTS,
            "message": message[:_MAX_MESSAGE_CHARACTERS],
            "numbers": {} if limit is None else {"limit_bytes": limit},
        }
    )


def host_memory_advice(pod: ObservedPod) -> str:
    field = f"resources.limits.memory of container rljob in spec.{pod.role}.template"
    if pod.memory_limit_bytes is None:
        return f"it has no memory limit, so its node ran out of memory: set {field}"
    return f"its limit is {byte_quantity(pod.memory_limit_bytes)}: raise {field}, or recovery.maxHostMemory"
