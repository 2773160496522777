"""Out-of-memory failures: their evidence, the input of the recovery engine, and its answers in the status.

A changed plan is in the status before anything acts on it; the pods of the next attempt are made from there.
"""

from __future__ import annotations

from rljob_api.exit_codes import ExitCode
from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import MAX_PLAN_CHANGES_KEPT, DiagnosisStatus, Phase, PlanChange, RemedyLevel
from rljob_api.quantity import byte_quantity
from rljob_api.status import OutOfMemoryStatus, Role
from rljob_api.step_report import Evidence
from rljob_memory.diagnosis import FailureClass, diagnosed
from rljob_memory.recovery import Changed, Constraints, FailureReport, RecoveryState, messages
from rljob_memory.recovery.constraints import policy_growth
from rljob_operator.events import EventReason
from rljob_operator.objects.pod_layout import predicted_limit_bytes
from rljob_operator.reconcile.attempt_result import REQUESTED, AttemptResult, Failed, counted_attempts
from rljob_operator.reconcile.creation import can_restart_in_place
from rljob_operator.reconcile.observed import ContainerTermination, ObservedPod
from rljob_operator.reconcile.placement import can_avoid
from rljob_operator.reconcile.status import StatusDraft
from rljob_operator.reconcile.view import JobView, possible_times, with_possible_time

_REPLACED: frozenset[RemedyLevel] = frozenset({"ReplacePods"})

# --- Input of the recovery engine ---


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
    """`pod`: the pod that ran out of memory; None for every other failure."""
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


# --- Records in the status ---


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


# --- Evidence: the trainer's own, else from its pods ---


OUT_OF_MEMORY_CODES = frozenset(
    {ExitCode.DEVICE_OUT_OF_MEMORY, ExitCode.HOST_OUT_OF_MEMORY, ExitCode.SHARED_MEMORY_EXHAUSTED}
)
_CLASS_OF_CODE = {
    ExitCode.HOST_OUT_OF_MEMORY: FailureClass.HOST_MEMORY,
    ExitCode.SHARED_MEMORY_EXHAUSTED: FailureClass.SHARED_MEMORY,
}
_BY_THE_KERNEL, _BY_THE_EXIT_CODE = 0.98, 0.9
_LONGEST_MESSAGE = 2048


def evidence_of_exit(pod: ObservedPod, end: ContainerTermination, message: str, view: JobView) -> Evidence:
    """Evidence of a container that ended with one of the out-of-memory exit codes: the trainer's, if it left any.

    The StepReport has it complete, the termination message at most 4,096 bytes of it. It comes with its diagnoses.
    """
    ended_with = end.message.evidence if end.message else None
    ended_with = ended_with and with_possible_time(ended_with, *possible_times(view.observed, view.now))
    reported = view.report.last_evidence if view.report else None
    found = [evidence for evidence in (reported, ended_with) if evidence is not None and _is_unanswered(evidence, view)]
    class_ = _CLASS_OF_CODE.get(ExitCode(end.exit_code))
    if not found:
        return diagnosed(_evidence_of_pod(pod, end, message, class_, _BY_THE_EXIT_CODE, view), _plan_followed(view))
    evidence = diagnosed(max(found, key=lambda one: one.time), _plan_followed(view))
    if class_ is None or any(cause.class_name != FailureClass.UNKNOWN for cause in evidence.diagnoses):
        return evidence
    by_code = _diagnosis(class_, _BY_THE_EXIT_CODE, evidence.message, pod_of(evidence, pod, view))
    return evidence.model_copy(update={"diagnoses": [by_code]})


def evidence_of_kill(pod: ObservedPod, end: ContainerTermination, message: str, view: JobView) -> Evidence:
    """Evidence of a container that the kernel killed for its memory, and that could not report anything."""
    return _evidence_of_pod(pod, end, message, FailureClass.HOST_MEMORY, _BY_THE_KERNEL, view)


def pod_of(evidence: Evidence, reporter: ObservedPod, view: JobView) -> ObservedPod:
    """The pod whose memory ran out: that of the process in the evidence, else the pod that reported it."""
    place = view.layout.pod_of(evidence.role, evidence.rank)
    return next((pod for pod in view.pods if (pod.role, pod.index) == place), reporter)


def _plan_followed(view: JobView) -> MemoryPlan | None:
    """The plan that it failed under, if the trainer follows it: a diagnosis asks whether the engine slept."""
    trainer = view.spec.trainer
    if trainer is not None and "rolloutSleep" not in trainer.supported_settings:
        return None
    return view.status.plan or (view.report.plan if view.report else None)


def _is_unanswered(evidence: Evidence, view: JobView) -> bool:
    """The evidence belongs to the latest attempt, and no change of the plan has answered its failure."""
    assert view.attempt is not None
    changes = [*view.status.plan_changes, *(view.report.plan_changes if view.report else [])]
    answered = any(change.attempt == evidence.attempt and change.time >= evidence.time for change in changes)
    return evidence.attempt == view.attempt.number and not answered


def _evidence_of_pod(
    pod: ObservedPod,
    end: ContainerTermination,
    message: str,
    class_: FailureClass | None,
    confidence: float,
    view: JobView,
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
        phase=_phase(view),
        message=message,
        diagnoses=[_diagnosis(class_, confidence, message, pod)] if class_ else [],
    )


def _diagnosis(class_: FailureClass, confidence: float, message: str, pod: ObservedPod) -> DiagnosisStatus:
    limit = pod.memory_limit_bytes if class_ is FailureClass.HOST_MEMORY else None
    return DiagnosisStatus.model_validate(
        {
            "class": class_.value,
            "confidence": confidence,
            "message": message[:_LONGEST_MESSAGE],
            "numbers": {"limit_bytes": limit} if limit is not None else {},
        }
    )


def _phase(view: JobView) -> Phase | None:
    """The phase that the attempt was in when it last reported."""
    assert view.attempt is not None
    return view.report_of_attempt.phase if view.report_of_attempt else None


def host_memory_advice(pod: ObservedPod) -> str:
    where = f"resources.limits.memory of container rljob in spec.{pod.role}.template"
    if pod.memory_limit_bytes is None:
        return f"it has no memory limit, so its node ran out of memory: set {where}"
    return f"its limit is {byte_quantity(pod.memory_limit_bytes)}: raise {where}, or recovery.maxHostMemory"
