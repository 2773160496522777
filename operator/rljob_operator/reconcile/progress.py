"""Progress of a job from the trainer's report: step, reward, memory."""

from __future__ import annotations

from collections.abc import Sequence

from rljob_api.conditions import ConditionType
from rljob_api.status import JobMemory, RolePods
from rljob_api.step_report import RankMemory
from rljob_operator.reconcile.status_draft import EventReason, StatusDraft
from rljob_operator.reconcile.view import JobView, Stage


def record_progress(view: JobView, draft: StatusDraft) -> None:
    """Record progress. The number of committed steps never decreases, even if a report is late."""
    draft.set(step=committed_steps(view), steps=view.spec.algorithm.steps)
    draft.set(pods=pods_by_role(view) if view.stage is Stage.LIVE else [])
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


def committed_steps(view: JobView) -> int | None:
    """Committed steps: the maximum of the status, the StepReport and termination messages."""
    reported = [view.status.step, view.report.step if view.report else None]
    for pod in view.observed.pods:
        if pod.end and pod.end.message and (pod.end.message.step or 0) <= view.spec.algorithm.steps:
            reported.append(pod.end.message.step)
    return max((step for step in reported if step is not None), default=None)


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


def pods_by_role(view: JobView) -> list[RolePods]:
    """Pods of the latest attempt, or of the one that is about to begin."""
    expected = [role for _, role in view.expected_pods]
    ready = [pod.role for pod in view.pods if pod.ready and not pod.ended]
    return [
        RolePods(role=role, desired=expected.count(role), ready=min(ready.count(role), expected.count(role)))
        for role in dict.fromkeys(expected)
    ]
