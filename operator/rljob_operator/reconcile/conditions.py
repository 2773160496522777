"""Conditions and progress of a live attempt, as its pods and its trainer report them."""

from __future__ import annotations

from collections.abc import Sequence

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_api.status import JobMemory
from rljob_api.step_report import RankMemory
from rljob_memory.recovery import messages
from rljob_memory.recovery.state import latest_answer
from rljob_operator.events import EventReason
from rljob_operator.objects.placement import queue_of
from rljob_operator.objects.pod_layout import low_memory_limit
from rljob_operator.reconcile.observed import ObservedPod
from rljob_operator.reconcile.placement import growth_note, unplaceable
from rljob_operator.reconcile.pods import waiting_for
from rljob_operator.reconcile.status import StatusDraft
from rljob_operator.reconcile.timers import overdue_step, start_problem
from rljob_operator.reconcile.view import JobView, Stage, and_more, elapsed_seconds

_SETTLING_SECONDS = 5.0
"""Pods that are scheduled and start soon after their creation need one write only: the steps in between are reported
after this time."""


# --- Scheduled ---


def set_scheduled(view: JobView, draft: StatusDraft) -> None:
    if view.holds(ConditionType.SCHEDULED):
        return
    if settling_seconds_left(view) and not view.all_ready:
        return
    if view.missing or not all(pod.node for pod in view.pods):
        draft.condition(ConditionType.SCHEDULED, False, *_why_not_placed(view))
    else:
        draft.set(start_time=draft.status.start_time or view.now)
        draft.condition(ConditionType.SCHEDULED, True, *_placement(view))


def settling_seconds_left(view: JobView) -> float | None:
    """Return the seconds until pods that were scheduled just now are reported; None if there are none, or if others
    find no node."""
    placed = [pod.placed_at for pod in view.pods if pod.node]
    if view.holds(ConditionType.SCHEDULED) or not placed or any(pod.unschedulable for pod in view.pods):
        return None
    since = max(placed)
    return max(0.0, _SETTLING_SECONDS - elapsed_seconds(since, view.now)) or None


def _why_not_placed(view: JobView) -> tuple[ConditionReason, str]:
    if any(pod.gated for pod in view.pods):
        queue = f" {name}" if (name := queue_of(view.job)) else ""
        return ConditionReason.WAITING_FOR_QUEUE, f"the pods wait for admission by the queue{queue}{growth_note(view)}"
    if (message := unplaceable(view)) is not None:
        return ConditionReason.UNSCHEDULABLE, message
    placed = sum(1 for pod in view.pods if pod.node)
    message = f"{placed} of {len(view.expected_pods)} pods are scheduled" if placed else "the pods are being created"
    return ConditionReason.WAITING_FOR_PODS, message


def _placement(view: JobView) -> tuple[ConditionReason, str]:
    gpus = {node.name: node.gpus for node in view.observed.nodes if node.gpus}
    controller = view.controller
    if controller is None or controller.node not in gpus:
        return ConditionReason.PODS_SCHEDULED, "all pods are scheduled"
    message = (
        f"the controller runs on {controller.node}, a node with {gpus[controller.node]} GPUs, which are hidden "
        "from it; add a node without GPUs"
    )
    return ConditionReason.CONTROLLER_ON_GPU_NODE, message


# --- Running ---


def set_running(view: JobView, draft: StatusDraft) -> None:
    """Set the condition. A trainer that has ended runs no steps, while the cause of its end is awaited."""
    runs = view.holds(ConditionType.RUNNING)
    if ended := _ended(view, draft):
        # The pods of another trainer may end one after the other, when their work is done.
        runs = runs and not view.own_trainer
        reason = ConditionReason.STEPS_COMMITTED if runs else ConditionReason.STOPPING
        draft.condition(ConditionType.RUNNING, runs, reason, ended)
    elif runs or view.all_ready:
        if not runs:
            _report_start(view, draft)
        draft.condition(ConditionType.RUNNING, True, *_progress(view, draft))
    elif problem := start_problem(view):
        draft.condition(ConditionType.RUNNING, False, ConditionReason.POD_CANNOT_START, problem)
    elif not settling_seconds_left(view):
        draft.condition(ConditionType.RUNNING, False, ConditionReason.STARTING, _why_not_ready(view))


def _ended(view: JobView, draft: StatusDraft) -> str | None:
    """Return a message about pods whose trainer has ended; None if all run, apart from pods that are being replaced."""
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
    name = slow[0].name
    return f"pod {name}{and_more(slow)} has not started; for images and volumes, see kubectl describe pod {name}"


def _sidecar_problem(pod: ObservedPod) -> str:
    """Return a message about a container other than the trainer that failed or cannot start; empty if there is none."""
    if pod.failed_sidecar:
        return pod.failed_sidecar.message("container", pod.name)
    return f"pod {pod.name}: {pod.waiting}" if pod.waiting and pod.started else ""


def _report_start(view: JobView, draft: StatusDraft) -> None:
    assert view.attempt is not None
    number, step = view.attempt.number, view.attempt.from_step
    if draft.holds(ConditionType.RECOVERING):
        draft.condition(ConditionType.RECOVERING, False, ConditionReason.RECOVERED, f"attempt {number} runs")
    if number > 1:  # of the first one, the condition Running is enough
        draft.event("Normal", EventReason.ATTEMPT_STARTED, f"attempt {number} runs from step {step}")


def _progress(view: JobView, draft: StatusDraft) -> tuple[ConditionReason, str]:
    if problem := view.report_problem:
        return ConditionReason.STEP_REPORT_IGNORED, f"the pods run, but status.step is out of date: {problem}"
    if overdue := overdue_step(view):
        return ConditionReason.STEP_OVERDUE, overdue
    sidecar = next((f"; {problem}" for pod in view.pods if (problem := _sidecar_problem(pod))), "")
    return ConditionReason.STEPS_COMMITTED, f"steps are being committed{waiting_for(view, draft)}{sidecar}"


# --- Progress ---


def record_progress(view: JobView, draft: StatusDraft) -> None:
    """Record progress. The number of committed steps never decreases, even if a report is late."""
    draft.set(step=view.committed_steps, steps=view.spec.algorithm.steps)
    draft.set(pods=view.pods_by_role if view.stage is Stage.LIVE else [])
    report = view.report
    if report is None:
        return
    if report.reward is not None and (report.step or 0) >= (view.status.step or 0):
        draft.set(reward=report.reward)
    if report.evaluation is not None:
        draft.set(evaluation=report.evaluation)
    if (memory := fullest_gpu(report.memory)) is not None:
        draft.set(memory=memory)


def fullest_gpu(ranks: Sequence[RankMemory]) -> JobMemory | None:
    """Return the memory of the GPU with the least headroom at its peak; None if no process is on a GPU.

    Memory outside torch counts as it was when the process reported; that of its own allocator at its peak.
    """
    peaks = []
    for rank in ranks:
        total = rank.device_total_bytes
        outside = max(0, total - rank.device_free_bytes - rank.reserved_bytes)
        memory = JobMemory(
            peak_allocated_bytes=rank.peak_allocated_bytes,
            peak_reserved_bytes=rank.peak_reserved_bytes,
            outside_torch_bytes=outside,
            limit_bytes=total,
            headroom_bytes=total - outside - rank.peak_reserved_bytes,
        )
        if total > 0:
            peaks.append(memory)
    return min(peaks, key=lambda memory: memory.headroom_bytes, default=None)


# --- Degraded, Recovering, MemoryPressure ---


def set_degraded(view: JobView, draft: StatusDraft) -> None:
    """Degraded is true while the last step has a warning. It stays true in a job that ends so."""
    report = view.report_of_attempt
    if report is None or report.training_warning is None:
        draft.reset(ConditionType.DEGRADED)
        return
    warning = report.training_warning
    if not view.holds(ConditionType.DEGRADED):
        draft.event("Warning", EventReason.DEGRADED, warning.message)
    draft.condition(ConditionType.DEGRADED, True, warning.reason, warning.message)


def set_recovering(view: JobView, draft: StatusDraft) -> None:
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


def set_memory_pressure(view: JobView, draft: StatusDraft) -> None:
    """MemoryPressure is true as long as the trainer forecasts that memory will run out."""
    report = view.report_of_attempt
    if report is None or report.memory_pressure is None:
        draft.reset(ConditionType.MEMORY_PRESSURE)
        if low := low_memory_limit(view.spec):
            draft.condition(ConditionType.MEMORY_PRESSURE, False, ConditionReason.LIMIT_BELOW_PREDICTION, low)
        return
    message = messages.pressure_message(report.memory_pressure)
    if waits := next((f"pod {pod.name}: {pod.resize_pending}" for pod in view.pods if pod.resize_pending), ""):
        message = f"{message} The node has no room for a larger limit of {waits}"
    draft.condition(ConditionType.MEMORY_PRESSURE, True, ConditionReason.MEMORY_RUNNING_OUT, message)
