"""The conditions Scheduled and Running of a live attempt, and overdue steps."""

from __future__ import annotations

from datetime import UTC

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_api.step_report import StepReportStatus
from rljob_operator.objects.gang_scheduling import queue_of
from rljob_operator.reconcile.observed import ObservedPod
from rljob_operator.reconcile.placement import growth_note, unplaceable
from rljob_operator.reconcile.pod_replacement import waiting_for
from rljob_operator.reconcile.status_draft import EventReason, StatusDraft
from rljob_operator.reconcile.timeouts import start_problem
from rljob_operator.reconcile.timing import elapsed_seconds
from rljob_operator.reconcile.view import JobView

_SETTLING_SECONDS = 5.0
"""Pods that start soon after being scheduled need one write only: Scheduled is set after this time."""


def set_scheduled_condition(view: JobView, draft: StatusDraft) -> None:
    if view.holds(ConditionType.SCHEDULED):
        return
    if not _all_placed(view):
        draft.condition(ConditionType.SCHEDULED, False, *_why_not_placed(view))
    elif view.all_ready or not settling_seconds_left(view):
        _set_scheduled(view, draft)


def set_running_condition(view: JobView, draft: StatusDraft) -> None:
    """Set the condition. A trainer that has ended runs no steps, while the cause of its end is awaited."""
    if ended := _ended(view, draft):
        # The pods of another trainer may end one after the other, when their work is done.
        runs = view.holds(ConditionType.RUNNING) and not view.own_trainer
        reason = ConditionReason.STEPS_COMMITTED if runs else ConditionReason.STOPPING
        draft.condition(ConditionType.RUNNING, runs, reason, ended)
    elif view.holds(ConditionType.RUNNING):
        _set_running(view, draft)
    elif view.all_ready:
        _set_started(view, draft)
    elif problem := start_problem(view):
        draft.condition(ConditionType.RUNNING, False, ConditionReason.POD_CANNOT_START, problem)
    else:
        draft.condition(ConditionType.RUNNING, False, ConditionReason.STARTING, _why_not_ready(view))


def settling_seconds_left(view: JobView) -> float | None:
    """Seconds until Scheduled is set; None if it is set, or pods are not scheduled."""
    if view.holds(ConditionType.SCHEDULED) or not _all_placed(view):
        return None
    since = max(pod.placed_at for pod in view.pods)
    return max(0.0, _SETTLING_SECONDS - elapsed_seconds(since, view.now)) or None


# --- Scheduled ---


def _all_placed(view: JobView) -> bool:
    return not view.missing and all(pod.node for pod in view.pods)


def _why_not_placed(view: JobView) -> tuple[ConditionReason, str]:
    if any(pod.gated for pod in view.pods):
        queue = f" {name}" if (name := queue_of(view.job)) else ""
        return ConditionReason.WAITING_FOR_QUEUE, f"the pods wait for admission by the queue{queue}{growth_note(view)}"
    if (sentence := unplaceable(view)) is not None:
        return ConditionReason.UNSCHEDULABLE, sentence
    placed = sum(1 for pod in view.pods if pod.node)
    if not placed:
        return ConditionReason.WAITING_FOR_PODS, "the pods are being created"
    return ConditionReason.WAITING_FOR_PODS, f"{placed} of {len(view.expected_pods)} pods are scheduled"


def _set_scheduled(view: JobView, draft: StatusDraft) -> None:
    draft.set(start_time=draft.status.start_time or view.now)
    gpu_nodes = {node.name: node.gpus for node in view.observed.nodes if node.gpus}
    controller = view.controller
    if controller is None or controller.node not in gpu_nodes:
        draft.condition(ConditionType.SCHEDULED, True, ConditionReason.PODS_SCHEDULED, "all pods are scheduled")
        return
    sentence = (
        f"the controller runs on {controller.node}, a node with {gpu_nodes[controller.node]} GPUs, which are hidden "
        "from it; add a node without GPUs"
    )
    draft.condition(ConditionType.SCHEDULED, True, ConditionReason.CONTROLLER_ON_GPU_NODE, sentence)
    draft.event("Warning", EventReason.CONTROLLER_ON_GPU_NODE, sentence)


# --- Running ---


def _ended(view: JobView, draft: StatusDraft) -> str | None:
    """Message about pods whose trainer has ended; None if all run, apart from pods that are being replaced."""
    replaced = draft.attempt.replacing_pods if draft.attempt else []
    ended = [pod for pod in view.pods if pod.ended and pod.name not in replaced]
    if not ended:
        return None
    first = next((pod for pod in ended if pod.kept_by), ended[0])
    code = f" (exit code {first.end.exit_code})" if first.end else ""
    more = f" and {len(ended) - 1} more" if len(ended) > 1 else ""
    kept = f"; {first.kept_by}" if first.kept_by else ""
    return f"the trainer has ended in {first.name}{code}{more}; waiting for the other pods{kept}"


def _why_not_ready(view: JobView) -> str:
    for pod in view.pods:
        if sidecar := _sidecar_problem(pod):
            return f"not all pods are ready: {sidecar}"
    slow = [pod for pod in view.pods if pod.node and not pod.started]
    if not slow:
        return "the pods have not started"
    # The kubelet reports a volume that cannot be attached or mounted in Events alone.
    more = f" (and {len(slow) - 1} more)" if len(slow) > 1 else ""
    return f"pod {slow[0].name}{more} has not started; for images and volumes, see kubectl describe pod {slow[0].name}"


def _sidecar_problem(pod: ObservedPod) -> str:
    """Message about a container beside the trainer that failed or cannot start; empty if there is none."""
    if pod.failed_sidecar:
        return pod.failed_sidecar.message("container", pod.name)
    return f"pod {pod.name}: {pod.waiting}" if pod.waiting and pod.started else ""


def _set_started(view: JobView, draft: StatusDraft) -> None:
    assert view.attempt is not None
    number, step = view.attempt.number, view.attempt.from_step
    if draft.holds(ConditionType.RECOVERING):
        draft.condition(ConditionType.RECOVERING, False, ConditionReason.RECOVERED, f"attempt {number} runs")
    if number > 1:  # of the first one, the condition Running is enough
        draft.event("Normal", EventReason.ATTEMPT_STARTED, f"attempt {number} runs from step {step}")
    _set_running(view, draft)


def _set_running(view: JobView, draft: StatusDraft) -> None:
    before = draft.reason(ConditionType.RUNNING)
    if problem := view.report_problem:
        if before != ConditionReason.STEP_REPORT_IGNORED:
            draft.event("Warning", EventReason.STEP_REPORT_IGNORED, problem)
        message = f"the pods run, but status.step is out of date: {problem}"
        draft.condition(ConditionType.RUNNING, True, ConditionReason.STEP_REPORT_IGNORED, message)
    elif sentence := overdue_step(view):
        if before != ConditionReason.STEP_OVERDUE:
            draft.event("Warning", EventReason.STEP_OVERDUE, sentence)
        draft.condition(ConditionType.RUNNING, True, ConditionReason.STEP_OVERDUE, sentence)
    else:
        beside = next((f"; {problem}" for pod in view.pods if (problem := _sidecar_problem(pod))), "")
        message = f"steps are being committed{waiting_for(view, draft)}{beside}"
        draft.condition(ConditionType.RUNNING, True, ConditionReason.STEPS_COMMITTED, message)


_MIN_OVERDUE_SECONDS = 600.0
"""Even if steps are fast: a checkpoint may wait for its volume, a reward for its service."""
_FACTOR_OF_PREVIOUS_STEP = 20.0
_FIRST_STEP_SECONDS = 1800.0
"""The first step has no previous step to compare with."""


def overdue_step(view: JobView) -> str | None:
    """Message about a step that takes too long; None if no step is in progress, or it is in time."""
    if _seconds_left(view) != 0.0:
        return None
    report = view.report_of_attempt
    assert report is not None
    assert report.update_time is not None
    step = (report.step or 0) + 1
    phase = f" ({report.phase})" if report.phase else ""
    doing = f"step {step}{phase}" if step <= view.spec.algorithm.steps else "the final model"
    before = _seconds_of_last_step(report)
    beside = f"; the previous step took {before:.0f} s" if before is not None else ""
    return (
        f"{doing} is overdue: the trainer has reported nothing since "
        f"{report.update_time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC{beside}; "
        "check the log of the controller pod, and logs/ on the job's volume"
    )


def overdue_seconds_left(view: JobView) -> float | None:
    """Seconds until the current step is overdue; None if no step is in progress, or it is overdue already."""
    return _seconds_left(view) or None


def _seconds_left(view: JobView) -> float | None:
    """0 if the step is overdue. Counted from the last report: the trainer sends one when a phase begins."""
    report = view.report_of_attempt
    if report is None or report.update_time is None or not view.holds(ConditionType.RUNNING):
        return None
    before = _seconds_of_last_step(report)
    allowed = _FIRST_STEP_SECONDS if before is None else max(_MIN_OVERDUE_SECONDS, _FACTOR_OF_PREVIOUS_STEP * before)
    return max(0.0, allowed - elapsed_seconds(report.update_time, view.now))


def _seconds_of_last_step(report: StepReportStatus) -> float | None:
    return None if report.seconds is None else sum(report.seconds.model_dump().values())
