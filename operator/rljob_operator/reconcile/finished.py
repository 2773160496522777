"""A finished job: its GPUs are released, its controller pod is kept for its logs, and it may be resumed.

A pod in which a sidecar keeps running is not kept: it would hold its node's resources for ever.
"""

from __future__ import annotations

from dataclasses import replace

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_operator.reconcile.desired import Desired
from rljob_operator.reconcile.observed import ObservedPod
from rljob_operator.reconcile.pod_deletion import delete_pods
from rljob_operator.reconcile.resumption import failed_spec, is_answered, resume
from rljob_operator.reconcile.status_draft import EventReason, StatusDraft
from rljob_operator.reconcile.stuck_pods import Termination
from rljob_operator.reconcile.timeouts import seconds_to_live
from rljob_operator.reconcile.timing import elapsed_seconds, soonest
from rljob_operator.reconcile.view import JobView

_ENDS_WITHIN_SECONDS = 30.0
"""Time for a waiting controller to exit, and for sidecars to terminate after their trainer."""
_ENDED = "the job has ended"


def run_finished(view: JobView, draft: StatusDraft) -> Desired:
    if _has_more_steps(view):
        return _reopen(view, draft)
    if is_answered(view):
        resume(view, draft)
        return Desired()
    if view.holds(ConditionType.FAILED) and view.status.failure is None:  # by an earlier version of the operator
        draft.set(failure=failed_spec(view))
    if view.status.completion_time is None:
        draft.set(completion_time=view.now)
    left = seconds_to_live(view)
    if left == 0.0:
        return Desired(delete_job=True)
    ends_by_itself = _seconds_to_exit(view)
    kept = [pod for pod in view.observed.pods if _is_kept_for_logs(pod, view)]
    held = [pod for pod in kept if not pod.has_terminated]
    wait = _seconds_after_end(view) if held else None
    to_go = [pod for pod in view.observed.pods if pod not in kept or (pod in held and not wait)]
    if message := _held(held) if held else _ENDED if _is_whole(kept, view) else None:
        draft.condition(ConditionType.RUNNING, False, ConditionReason.PODS_TERMINATED, message)
    termination = Termination.of(view.observed, view.settings, view.now)
    deletions = Desired() if ends_by_itself else delete_pods(to_go, termination)
    requeue = soonest(left, wait, ends_by_itself, deletions.requeue_after_seconds)
    return replace(deletions, requeue_after_seconds=requeue)


def _is_kept_for_logs(pod: ObservedPod, view: JobView) -> bool:
    """Keep the controller pod, or all pods of another trainer, once their trainer has ended."""
    return pod.ended and (pod.role == "controller" or not view.own_trainer)


def _is_whole(kept: list[ObservedPod], view: JobView) -> bool:
    """No pod was deleted because of a sidecar."""
    return len(kept) == (1 if view.own_trainer else len(view.expected_pods))


def _held(pods: list[ObservedPod]) -> str:
    """Message about pods that sidecars keep from terminating. It stays in the condition after their deletion."""
    several = len(pods) > 1
    more = f" (and {len(pods) - 1} more)" if several else ""
    return (
        f"{_ENDED}; {pods[0].kept_by or f'pod {pods[0].name} has not terminated'}{more}: the operator deletes the "
        f"pod{'s' if several else ''} {_ENDS_WITHIN_SECONDS:.0f} s after the end, and the log is gone; to keep it, run "
        "sidecars as sidecar containers (initContainers with restartPolicy: Always)"
    )


def _seconds_to_exit(view: JobView) -> float | None:
    """Seconds for a controller that waits for a changed plan to exit by itself; a deletion would remove its logs."""
    return None if view.pending_exit is None else _seconds_after_end(view)


def _seconds_after_end(view: JobView) -> float | None:
    """Seconds until pods are deleted that should have terminated by themselves; None: now."""
    if view.status.completion_time is None:
        return None
    return max(0.0, _ENDS_WITHIN_SECONDS - elapsed_seconds(view.status.completion_time, view.now)) or None


def _has_more_steps(view: JobView) -> bool:
    return view.holds(ConditionType.COMPLETE) and (view.status.step or 0) < view.spec.algorithm.steps


def _reopen(view: JobView, draft: StatusDraft) -> Desired:
    sentence = f"{view.status.step or 0} of {view.spec.algorithm.steps} steps are committed"
    draft.condition(ConditionType.COMPLETE, False, ConditionReason.STEPS_RAISED, sentence)
    draft.set(completion_time=None)
    if draft.attempt is not None and draft.attempt.end_time is None:
        draft.change_attempt(end_time=view.now)
    draft.event("Normal", EventReason.STEPS_RAISED, sentence)
    return Desired()
