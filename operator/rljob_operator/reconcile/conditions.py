"""Conditions and progress of a live attempt, as its pods and its trainer report them."""

from __future__ import annotations

from collections.abc import Sequence

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_api.plan_change import PlanChange
from rljob_api.status import JobMemory
from rljob_api.step_report import RankMemory
from rljob_memory.recovery import messages
from rljob_memory.recovery.state import latest_answer
from rljob_operator.events import EventReason
from rljob_operator.objects.gang_scheduling import queue_of
from rljob_operator.objects.predicted_memory import low_memory_limit
from rljob_operator.reconcile.memory_recovery import record_state, record_trainers_failure, recovery_state
from rljob_operator.reconcile.observed import ObservedPod
from rljob_operator.reconcile.placement import growth_note, unplaceable
from rljob_operator.reconcile.pod_replacement import waiting_for
from rljob_operator.reconcile.status import StatusDraft
from rljob_operator.reconcile.timeouts import overdue_step, start_problem
from rljob_operator.reconcile.view import JobView, Stage, elapsed_seconds

_SETTLING_SECONDS = 5.0
"""Pods that are scheduled and start soon after their creation need one write only: the steps in between are reported
after this time."""


def set_scheduled_condition(view: JobView, draft: StatusDraft) -> None:
    if view.holds(ConditionType.SCHEDULED):
        return
    if settling_seconds_left(view) and not view.all_ready:
        return
    if not _all_placed(view):
        draft.condition(ConditionType.SCHEDULED, False, *_why_not_placed(view))
    else:
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
    elif not settling_seconds_left(view):
        draft.condition(ConditionType.RUNNING, False, ConditionReason.STARTING, _why_not_ready(view))


def settling_seconds_left(view: JobView) -> float | None:
    """Seconds until pods that were scheduled just now are reported; None if there are none, or others find no node."""
    placed = [pod.placed_at for pod in view.pods if pod.node]
    if view.holds(ConditionType.SCHEDULED) or not placed or any(pod.unschedulable for pod in view.pods):
        return None
    since = max(placed)
    return max(0.0, _SETTLING_SECONDS - elapsed_seconds(since, view.now)) or None


# --- Scheduled ---


def _all_placed(view: JobView) -> bool:
    return not view.missing and all(pod.node for pod in view.pods)


def _why_not_placed(view: JobView) -> tuple[ConditionReason, str]:
    if any(pod.gated for pod in view.pods):
        queue = f" {name}" if (name := queue_of(view.job)) else ""
        return ConditionReason.WAITING_FOR_QUEUE, f"the pods wait for admission by the queue{queue}{growth_note(view)}"
    if (message := unplaceable(view)) is not None:
        return ConditionReason.UNSCHEDULABLE, message
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
    message = (
        f"the controller runs on {controller.node}, a node with {gpu_nodes[controller.node]} GPUs, which are hidden "
        "from it; add a node without GPUs"
    )
    draft.condition(ConditionType.SCHEDULED, True, ConditionReason.CONTROLLER_ON_GPU_NODE, message)
    draft.event("Warning", EventReason.CONTROLLER_ON_GPU_NODE, message)


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
    """Message about a container other than the trainer that failed or cannot start; empty if there is none."""
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
    elif overdue := overdue_step(view):
        if before != ConditionReason.STEP_OVERDUE:
            draft.event("Warning", EventReason.STEP_OVERDUE, overdue)
        draft.condition(ConditionType.RUNNING, True, ConditionReason.STEP_OVERDUE, overdue)
    else:
        sidecar = next((f"; {problem}" for pod in view.pods if (problem := _sidecar_problem(pod))), "")
        message = f"steps are being committed{waiting_for(view, draft)}{sidecar}"
        draft.condition(ConditionType.RUNNING, True, ConditionReason.STEPS_COMMITTED, message)


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
    if (memory := fullest_gpu(report.memory)) is not None:
        draft.set(memory=memory)


def set_degraded_condition(view: JobView, draft: StatusDraft) -> None:
    """Degraded is true while the last step has a warning. It stays true in a job that ends so."""
    current = view.report_of_attempt
    if current is None or current.training_warning is None:
        draft.reset(ConditionType.DEGRADED)
        return
    warning = current.training_warning
    if not draft.held(ConditionType.DEGRADED):
        draft.event("Warning", EventReason.DEGRADED, warning.message)
    draft.condition(ConditionType.DEGRADED, True, warning.reason, warning.message)


def fullest_gpu(ranks: Sequence[RankMemory]) -> JobMemory | None:
    """The GPU with the least room at its worst moment; None if no process is on a GPU.

    What is outside torch is taken as it was when the process reported; its own allocator at its peak.
    """
    return min(
        (_worst_moment(rank) for rank in ranks if rank.device_total_bytes > 0),
        key=lambda memory: memory.headroom_bytes,
        default=None,
    )


def _worst_moment(rank: RankMemory) -> JobMemory:
    outside = max(0, rank.device_total_bytes - rank.device_free_bytes - rank.reserved_bytes)
    return JobMemory(
        peak_allocated_bytes=rank.peak_allocated_bytes,
        peak_reserved_bytes=rank.peak_reserved_bytes,
        outside_torch_bytes=outside,
        limit_bytes=rank.device_total_bytes,
        headroom_bytes=rank.device_total_bytes - outside - rank.peak_reserved_bytes,
    )


# --- Memory ---


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
    message = messages.pressure_message(current.memory_pressure)
    if not draft.held(ConditionType.MEMORY_PRESSURE):
        draft.event("Warning", EventReason.MEMORY_PRESSURE, message)
    draft.condition(ConditionType.MEMORY_PRESSURE, True, ConditionReason.MEMORY_RUNNING_OUT, message)
