"""Timeouts: the deadline and the time to live of a job, the start of its pods, and overdue steps."""

from __future__ import annotations

from datetime import UTC

from rljob_api.conditions import AttemptReason, ConditionType
from rljob_api.step_report import StepReportStatus
from rljob_memory.recovery import GiveUpReason
from rljob_operator.reconcile.attempt_result import AttemptResult, Failed
from rljob_operator.reconcile.observed import ObservedPod
from rljob_operator.reconcile.view import JobView, condition_of, elapsed_seconds


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
    message = (
        f"the job has run for activeDeadlineSeconds: {view.spec.active_deadline_seconds}; "
        "its committed steps are on its volume"
    )
    return AttemptResult(AttemptReason.DEADLINE_EXCEEDED, message, Failed(GiveUpReason.DEADLINE_EXCEEDED))


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
        if never or _start_seconds_left(pod, view) == 0.0:
            final = None if _has_run(view) and not never else GiveUpReason.POD_CANNOT_START
            return AttemptResult(AttemptReason.POD_CANNOT_START, _start_message(pod, view), Failed(final))
    return None


def _has_run(view: JobView) -> bool:
    """The job has committed a step; or, since another trainer reports none, a container of it ended."""
    if view.own_trainer:
        return (view.status.step or 0) > 0
    return any(attempt.exit_code is not None for attempt in view.status.attempts[:-1])


def start_seconds_left(view: JobView) -> float | None:
    """Seconds until the first start timeout; None if all pods have started, or wait for a node."""
    return min((left for pod in view.pods if (left := _start_seconds_left(pod, view)) is not None), default=None)


def _start_seconds_left(pod: ObservedPod, view: JobView) -> float | None:
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


def _start_message(pod: ObservedPod, view: JobView) -> str:
    why = pod.waiting or pod.unschedulable
    if why is None:
        why = f"see kubectl describe pod {pod.name}"
    waited = elapsed_seconds(pod.placed_at, view.now)
    return f"pod {pod.name} has not started after {waited:.0f} s: {why}"


# --- Steps ---


_MIN_OVERDUE_SECONDS = 600.0
"""Even if steps are fast: a checkpoint may wait for its volume, a reward for its service."""
_FACTOR_OF_PREVIOUS_STEP = 20.0
_FIRST_STEP_SECONDS = 1800.0
"""The first step has no previous step to compare with."""


def overdue_step(view: JobView) -> str | None:
    """Message about a step that takes too long; None if no step is in progress, or it is in time."""
    if _step_seconds_left(view) != 0.0:
        return None
    report = view.report_of_attempt
    assert report is not None
    assert report.update_time is not None
    step = (report.step or 0) + 1
    phase = f" ({report.phase})" if report.phase else ""
    doing = f"step {step}{phase}" if step <= view.spec.algorithm.steps else "the final model"
    before = _seconds_of_last_step(report)
    previous = f"; the previous step took {before:.0f} s" if before is not None else ""
    return (
        f"{doing} is overdue: the trainer has reported nothing since "
        f"{report.update_time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC{previous}; "
        "check the log of the controller pod, and logs/ on the job's volume"
    )


def overdue_seconds_left(view: JobView) -> float | None:
    """Seconds until the current step is overdue; None if no step is in progress, or it is overdue already."""
    return _step_seconds_left(view) or None


def _step_seconds_left(view: JobView) -> float | None:
    """0 if the step is overdue. Counted from the last report: the trainer sends one when a phase begins."""
    report = view.report_of_attempt
    if report is None or report.update_time is None or not view.holds(ConditionType.RUNNING):
        return None
    before = _seconds_of_last_step(report)
    allowed = _FIRST_STEP_SECONDS if before is None else max(_MIN_OVERDUE_SECONDS, _FACTOR_OF_PREVIOUS_STEP * before)
    return max(0.0, allowed - elapsed_seconds(report.update_time, view.now))


def _seconds_of_last_step(report: StepReportStatus) -> float | None:
    return None if report.seconds is None else sum(report.seconds.model_dump().values())
