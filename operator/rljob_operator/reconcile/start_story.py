"""How the pods of a live attempt find nodes and start, told by the conditions Scheduled and Running.

Both stay true once they were, until the attempt ends: a probe that fails for a moment is no news.
"""

from __future__ import annotations

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_operator.reconcile.event_reasons import EventReason
from rljob_operator.reconcile.overdue import overdue_step
from rljob_operator.reconcile.starting import start_problem
from rljob_operator.reconcile.status_draft import StatusDraft
from rljob_operator.reconcile.timing import elapsed_seconds
from rljob_operator.reconcile.unplaceable import unplaceable
from rljob_operator.reconcile.view import JobView

_SETTLING_SECONDS = 5.0
"""Pods that start as soon as they are placed are told of in one write: being placed is news only after so long."""


def tell_placement(view: JobView, draft: StatusDraft) -> None:
    if view.holds(ConditionType.SCHEDULED):
        return
    if not _all_placed(view):
        draft.condition(ConditionType.SCHEDULED, False, *_why_not_placed(view))
    elif view.all_ready or not settling_seconds_left(view):
        _tell_placed(view, draft)


def tell_start(view: JobView, draft: StatusDraft) -> None:
    if view.holds(ConditionType.RUNNING):
        _tell_running(view, draft)
    elif view.all_ready:
        _tell_begun(view, draft)
    elif problem := start_problem(view):
        draft.condition(ConditionType.RUNNING, False, ConditionReason.POD_CANNOT_START, problem)
    else:
        draft.condition(ConditionType.RUNNING, False, ConditionReason.STARTING, "the pods have not started")


def settling_seconds_left(view: JobView) -> float | None:
    """Seconds until it is told that the pods are placed; None where they are not, or it has been told."""
    if view.holds(ConditionType.SCHEDULED) or not _all_placed(view):
        return None
    since = max(pod.placed_at for pod in view.pods)
    return max(0.0, _SETTLING_SECONDS - elapsed_seconds(since, view.now)) or None


# --- Scheduled ---


def _all_placed(view: JobView) -> bool:
    return not view.missing and all(pod.node for pod in view.pods)


def _why_not_placed(view: JobView) -> tuple[ConditionReason, str]:
    if any(pod.gated for pod in view.pods):
        queue = f" {view.spec.queue_name}" if view.spec.queue_name else ""
        return ConditionReason.WAITING_FOR_QUEUE, f"the pods wait for their admission by the queue{queue}"
    if (sentence := unplaceable(view)) is not None:
        return ConditionReason.UNSCHEDULABLE, sentence
    placed = sum(1 for pod in view.pods if pod.node)
    if not placed:
        return ConditionReason.WAITING_FOR_PODS, "the pods are being created"
    return ConditionReason.WAITING_FOR_PODS, f"{placed} of {len(view.expected_pods)} pods are placed"


def _tell_placed(view: JobView, draft: StatusDraft) -> None:
    gpu_nodes = {node.name: node.gpus for node in view.observed.nodes if node.gpus}
    controller = view.controller
    if controller is None or controller.node not in gpu_nodes:
        draft.condition(ConditionType.SCHEDULED, True, ConditionReason.PODS_SCHEDULED, "all pods are placed")
        return
    sentence = (
        f"the controller is on {controller.node}, a node with GPUs ({gpu_nodes[controller.node]}): "
        "they are hidden from it; add a node without GPUs to keep it off"
    )
    draft.condition(ConditionType.SCHEDULED, True, ConditionReason.CONTROLLER_ON_GPU_NODE, sentence)
    draft.event("Warning", EventReason.CONTROLLER_ON_GPU_NODE, sentence)


# --- Running ---


def _tell_begun(view: JobView, draft: StatusDraft) -> None:
    assert view.attempt is not None
    number, step = view.attempt.number, view.attempt.from_step
    if draft.holds(ConditionType.RECOVERING):
        draft.condition(ConditionType.RECOVERING, False, ConditionReason.RECOVERED, f"attempt {number} runs")
    draft.event("Normal", EventReason.ATTEMPT_STARTED, f"attempt {number} commits steps from step {step} on")
    _tell_running(view, draft)


def _tell_running(view: JobView, draft: StatusDraft) -> None:
    told = draft.reason(ConditionType.RUNNING)
    if problem := view.report_problem:
        if told != ConditionReason.STEP_REPORT_IGNORED:
            draft.event("Warning", EventReason.STEP_REPORT_IGNORED, problem)
        message = f"the pods run, but status.step is not up to date: {problem}"
        draft.condition(ConditionType.RUNNING, True, ConditionReason.STEP_REPORT_IGNORED, message)
    elif sentence := overdue_step(view):
        if told != ConditionReason.STEP_OVERDUE:
            draft.event("Warning", EventReason.STEP_OVERDUE, sentence)
        draft.condition(ConditionType.RUNNING, True, ConditionReason.STEP_OVERDUE, sentence)
    else:
        draft.condition(ConditionType.RUNNING, True, ConditionReason.STEPS_COMMITTED, "steps are being committed")
