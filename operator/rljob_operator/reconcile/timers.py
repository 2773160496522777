"""Deadlines and delays: of the job, between its attempts, of the start of pods, and of steps. All are in seconds."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from datetime import UTC, datetime

from rljob_api.conditions import AttemptReason, ConditionType
from rljob_api.status import AttemptStatus, RLJobStatus
from rljob_api.step_report import StepReportStatus
from rljob_memory.recovery import GiveUpReason
from rljob_operator.reconcile.desired import AttemptFailure, AttemptResult
from rljob_operator.reconcile.observed import ObservedPod
from rljob_operator.reconcile.view import JobView, elapsed_seconds

# --- The job ---


def deadline_seconds_left(view: JobView) -> float | None:
    """Return the seconds until `spec.activeDeadlineSeconds` have passed; None without a deadline, or before the start.

    Counted from the start, or from the last time that the job was resumed or given more steps. The clock is stopped
    while the job is suspended.
    """
    allowed, begun = view.spec.active_deadline_seconds, view.status.start_time
    if allowed is None or begun is None or view.holds(ConditionType.SUSPENDED):
        return None
    for type_ in (ConditionType.SUSPENDED, ConditionType.COMPLETE, ConditionType.FAILED):
        condition = view.condition(type_)
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
    return AttemptResult(AttemptReason.DEADLINE_EXCEEDED, message, AttemptFailure(GiveUpReason.DEADLINE_EXCEEDED))


def seconds_to_live(view: JobView) -> float | None:
    """Return the seconds until a finished job is deleted; None if it is kept."""
    allowed, ended = view.spec.ttl_seconds_after_finished, view.status.completion_time
    return None if allowed is None or ended is None else max(0.0, allowed - elapsed_seconds(ended, view.now))


# --- The next attempt ---


MAX_RESTART_DELAY_SECONDS = 300.0
MAX_UNCOUNTED_WITHOUT_PROGRESS = 20
"""More attempts in a row that the cluster ended before they committed a step are a loop."""

REQUESTED = frozenset(
    {
        AttemptReason.SUSPEND_REQUESTED,
        AttemptReason.STEPS_RAISED,
        AttemptReason.PLACEMENT_TIMED_OUT,
        AttemptReason.NOT_RESTARTED_IN_PLACE,
        AttemptReason.ALL_STEPS_COMMITTED,
    }
)
"""Ends of attempts that are not failures: nothing has to recover from them."""
_UNCOUNTED = frozenset({AttemptReason.PODS_DISRUPTED, AttemptReason.INTERRUPTED, AttemptReason.NOT_RESTARTED_IN_PLACE})
_PROGRESS_WITHOUT_STEPS_SECONDS = 3600.0
"""Another trainer reports no steps: an attempt that lasted this long counts as progress."""
_MAX_PLACEMENT_RETRY_FACTOR = 10.0


def counted_attempts(status: RLJobStatus) -> list[AttemptStatus]:
    """Return the attempts since the job was last resumed from a failure; oldest first."""
    first = status.resumed_from_attempt or 1
    return [attempt for attempt in status.attempts if attempt.number >= first]


def restart_delay_seconds(attempts: Sequence[AttemptStatus], first_delay_seconds: float) -> float:
    """Return the delay between the end of the last of `attempts` and the next.

    0 after progress, a change of the memory plan, or a requested end; doubled with each further attempt in a row that
    committed nothing, whatever the cause.
    """
    without_progress = 0
    for attempt in reversed(attempts):
        if attempt.reason in REQUESTED or attempt.remedy is not None or _has_committed(attempt):
            break
        without_progress += 1
    if without_progress == 0:
        return 0.0
    return min(first_delay_seconds * 2.0 ** (without_progress - 1), MAX_RESTART_DELAY_SECONDS)


def placement_retry_seconds(first_seconds: float, retries: int, uid: str) -> float:
    """Return the delay before the pods of the job `uid` are created again, after `retries` failures.

    Up to half longer for some jobs: two that have released their pods at the same time must not try again at the same
    time.
    """
    spread = 1.0 + zlib.crc32(uid.encode()) % 1000 / 2000
    return float(math.ceil(first_seconds * min(2.0 ** min(retries, 10), _MAX_PLACEMENT_RETRY_FACTOR) * spread))


def uncounted_without_progress(attempts: Sequence[AttemptStatus], *, reports_steps: bool, now: datetime) -> int:
    """Return the number of the latest attempts that ended without progress, and without being counted as a restart."""
    count = 0
    for attempt in reversed(attempts):
        lasted_seconds = elapsed_seconds(attempt.start_time, attempt.end_time or now)
        progress = _has_committed(attempt) if reports_steps else lasted_seconds >= _PROGRESS_WITHOUT_STEPS_SECONDS
        if progress or attempt.reason == AttemptReason.SUSPEND_REQUESTED:
            break
        count += attempt.reason in _UNCOUNTED
    return count


def _has_committed(attempt: AttemptStatus) -> bool:
    return attempt.to_step is not None and attempt.to_step >= attempt.from_step


# --- The start of pods ---


_PERMANENT = ("InvalidImageName",)


def start_problem(view: JobView) -> str | None:
    """Return a message about a pod that cannot start; None if all can, as far as is known."""
    waiting = (pod for pod in view.pods if pod.waiting and not pod.started)
    return next((f"pod {pod.name} cannot start: {pod.waiting}" for pod in waiting), None)


def cannot_start(view: JobView) -> AttemptResult | None:
    """Return the result of an attempt whose pods did not start in time.

    Another attempt follows if the job has run before: its pods could start, so a registry or a storage is unavailable.
    """
    for pod in view.pods:
        never = pod.waiting is not None and pod.waiting.startswith(_PERMANENT)
        if never or _start_seconds_left(pod, view) == 0.0:
            final = None if _has_run(view) and not never else GiveUpReason.POD_CANNOT_START
            cause = pod.waiting or pod.unschedulable or f"see kubectl describe pod {pod.name}"
            waited = elapsed_seconds(pod.placed_at, view.now)
            message = f"pod {pod.name} has not started after {waited:.0f} s: {cause}"
            return AttemptResult(AttemptReason.POD_CANNOT_START, message, AttemptFailure(final))
    return None


def _has_run(view: JobView) -> bool:
    """The job has committed a step; or, since another trainer reports none, a container of it ended."""
    if view.own_trainer:
        return (view.status.step or 0) > 0
    return any(attempt.exit_code is not None for attempt in view.status.attempts[:-1])


def start_seconds_left(view: JobView) -> float | None:
    """Return the seconds until the first start timeout; None if all pods have started, or wait for a node."""
    return min((left for pod in view.pods if (left := _start_seconds_left(pod, view)) is not None), default=None)


def _start_seconds_left(pod: ObservedPod, view: JobView) -> float | None:
    problem = (pod.unschedulable or "").lower()
    if pod.started or pod.ended:
        return None
    if pod.node:
        since = pod.placed_at
    elif "persistentvolumeclaim" in problem and "not found" in problem:  # persistentvolumeclaim "x" not found
        since = pod.created_at
    else:
        return None
    return max(0.0, view.settings.start_timeout_seconds - elapsed_seconds(since, view.now))


# --- Steps ---


_MIN_OVERDUE_SECONDS = 600.0
"""Even if steps are fast: a checkpoint may wait for its volume, a reward for its service."""
_FACTOR_OF_PREVIOUS_STEP = 20.0
"""A step is overdue after this many times the duration of the previous one."""
_FIRST_STEP_SECONDS = 1800.0
"""The first step has no previous step to compare with."""


def overdue_step(view: JobView) -> str | None:
    """Return a message about a step that takes too long; None if no step is in progress, or it is in time."""
    report = view.report_of_attempt
    if report is None or report.update_time is None or _step_seconds_left(view) != 0.0:
        return None
    step, last = (report.step or 0) + 1, _last_step_seconds(report)
    phase = f" ({report.phase})" if report.phase else ""
    work = f"step {step}{phase}" if step <= view.spec.algorithm.steps else "the final model"
    previous = f"; the previous step took {last:.0f} s" if last is not None else ""
    return (
        f"{work} is overdue: the trainer has reported nothing since "
        f"{utc_text(report.update_time)}{previous}; "
        "check the log of the controller pod, and logs/ on the job's volume"
    )


def overdue_seconds_left(view: JobView) -> float | None:
    """Return the seconds until the current step is overdue; None if no step is in progress, or it already is."""
    return _step_seconds_left(view) or None


def _step_seconds_left(view: JobView) -> float | None:
    """0 if the step is overdue. Counted from the last report: the trainer sends one when a phase begins."""
    report = view.report_of_attempt
    if report is None or report.update_time is None or not view.holds(ConditionType.RUNNING):
        return None
    last = _last_step_seconds(report)
    allowed = _FIRST_STEP_SECONDS if last is None else max(_MIN_OVERDUE_SECONDS, _FACTOR_OF_PREVIOUS_STEP * last)
    return max(0.0, allowed - elapsed_seconds(report.update_time, view.now))


def _last_step_seconds(report: StepReportStatus) -> float | None:
    return None if report.seconds is None else sum(report.seconds.model_dump().values())


def utc_text(time: datetime) -> str:
    """Return `2026-01-31 12:00:00 UTC`."""
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
