"""Timeouts: the deadline and the time to live of a job, and the time that pods have to start."""

from __future__ import annotations

from rljob_api.conditions import AttemptReason, ConditionType
from rljob_memory.recovery import GiveUpReason
from rljob_operator.reconcile.observed import ObservedPod
from rljob_operator.reconcile.timing import elapsed_seconds
from rljob_operator.reconcile.verdict import AttemptResult, Failed
from rljob_operator.reconcile.view import JobView, condition_of


def deadline_seconds_left(view: JobView) -> float | None:
    """Seconds until `spec.activeDeadlineSeconds` have passed; None without a deadline, or before the start.

    Counted from the start, or from the last time that the job was resumed or given more steps. The clock is stopped
    while the job is suspended.
    """
    allowed, begun = view.spec.active_deadline_seconds, view.status.start_time
    if allowed is None or begun is None or view.holds(ConditionType.SUSPENDED):
        return None
    for type_ in (ConditionType.SUSPENDED, ConditionType.COMPLETE, ConditionType.FAILED):
        condition = condition_of(view.status, type_)
        if condition is not None and condition.status == "False":
            begun = max(begun, condition.last_transition_time)
    return max(0.0, allowed - elapsed_seconds(begun, view.now))


def deadline_exceeded(view: JobView) -> AttemptResult | None:
    if deadline_seconds_left(view) != 0.0:
        return None
    sentence = (
        f"the job has run for activeDeadlineSeconds: {view.spec.active_deadline_seconds}; "
        "its committed steps are on its volume"
    )
    return AttemptResult(AttemptReason.DEADLINE_EXCEEDED, sentence, Failed(GiveUpReason.DEADLINE_EXCEEDED))


def seconds_to_live(view: JobView) -> float | None:
    """Seconds until a finished job is deleted; None if it is kept."""
    allowed, ended = view.spec.ttl_seconds_after_finished, view.status.completion_time
    return None if allowed is None or ended is None else max(0.0, allowed - elapsed_seconds(ended, view.now))


_PERMANENT = ("InvalidImageName",)


def start_problem(view: JobView) -> str | None:
    """Message about a pod that cannot start; None if all can, as far as is known."""
    for pod in view.pods:
        if pod.waiting and not pod.started:
            return f"pod {pod.name} cannot start: {pod.waiting}"
    return None


def cannot_start(view: JobView) -> AttemptResult | None:
    """Result of an attempt whose pods did not start in time.

    Another attempt follows if the job has run before: its pods could start, so a registry or a storage is away.
    """
    for pod in view.pods:
        never = pod.waiting is not None and pod.waiting.startswith(_PERMANENT)
        if never or _seconds_left(pod, view) == 0.0:
            final = None if _has_run(view) and not never else GiveUpReason.POD_CANNOT_START
            return AttemptResult(AttemptReason.POD_CANNOT_START, _sentence(pod, view), Failed(final))
    return None


def _has_run(view: JobView) -> bool:
    """The job has committed a step; or, since another trainer reports none, a container of it ended."""
    if view.own_trainer:
        return (view.status.step or 0) > 0
    return any(attempt.exit_code is not None for attempt in view.status.attempts[:-1])


def start_seconds_left(view: JobView) -> float | None:
    """Seconds until the first start timeout; None if all pods have started, or wait for a node."""
    return min((left for pod in view.pods if (left := _seconds_left(pod, view)) is not None), default=None)


def _seconds_left(pod: ObservedPod, view: JobView) -> float | None:
    if pod.started or pod.ended:
        return None
    if pod.node:
        since = pod.placed_at
    elif pod.unschedulable and _mentions_missing_claim(pod.unschedulable):
        since = pod.created_at
    else:
        return None
    return max(0.0, view.settings.start_timeout_seconds - elapsed_seconds(since, view.now))


def _mentions_missing_claim(unschedulable: str) -> bool:
    """The scheduler reports a claim that does not exist: `persistentvolumeclaim "x" not found`."""
    return "persistentvolumeclaim" in unschedulable.lower() and "not found" in unschedulable


def _sentence(pod: ObservedPod, view: JobView) -> str:
    why = pod.waiting or pod.unschedulable
    if why is None:
        why = f"see kubectl describe pod {pod.name}"
    waited = elapsed_seconds(pod.placed_at, view.now)
    return f"pod {pod.name} has not started after {waited:.0f} s: {why}"
