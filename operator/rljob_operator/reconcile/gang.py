"""Gang scheduling: who schedules the pods of a job together, and when a partially scheduled job is released."""

from __future__ import annotations

import math
import zlib

from rljob_api.conditions import AttemptReason, ConditionReason, ConditionType
from rljob_operator.objects.attempt import Gang
from rljob_operator.objects.gang_scheduling import queue_of
from rljob_operator.reconcile.placement import refusal
from rljob_operator.reconcile.timing import elapsed_seconds
from rljob_operator.reconcile.verdict import AttemptResult, NotCounted
from rljob_operator.reconcile.view import JobView, condition_of

_LONGEST_RETRY_FACTOR = 10.0


def gang_of(view: JobView) -> Gang:
    if queue_of(view.job) is not None:
        return "Kueue"
    if view.spec.gang == "Volcano" or (view.spec.gang == "Auto" and view.observed.volcano_installed):
        return "Volcano"
    return "Native"


def half_placed_seconds_left(view: JobView) -> float | None:
    """Seconds until the pods of a job that is scheduled, or refused, in part are deleted; None if it is neither.

    Counted from the last pod that was scheduled, or created. Not without a gang. Pods that were created for Kueue or
    Volcano, even if the spec has changed since, are left to it once all of them exist.
    """
    if view.spec.gang == "Disabled" or not view.pods:
        return None
    if view.attempt is not None and view.attempt.replacing_pods:
        return None  # the others work meanwhile
    if not _is_refused_in_part(view):
        placed = sum(1 for pod in view.pods if pod.node)
        if view.missing or placed in (0, len(view.expected_pods)) or any(pod.in_group for pod in view.pods):
            return None
    since = max(pod.placed_at if pod.node else pod.created_at for pod in view.pods)
    return max(0.0, view.settings.placement_timeout_seconds - elapsed_seconds(since, view.now))


def half_placed_too_long(view: JobView) -> AttemptResult | None:
    if half_placed_seconds_left(view) != 0.0:
        return None
    if _is_refused_in_part(view) and (refused := refusal(view)):
        sentence = f"only {len(view.pods)} of {len(view.expected_pods)} pods exist, so all are deleted: {refused[1]}"
        return AttemptResult(AttemptReason.PLACEMENT_TIMED_OUT, sentence, NotCounted())
    placed = sum(1 for pod in view.pods if pod.node)
    scheduled = condition_of(view.status, ConditionType.SCHEDULED)
    why = f": {scheduled.message}" if scheduled and scheduled.reason == ConditionReason.UNSCHEDULABLE else ""
    sentence = f"only {placed} of {len(view.expected_pods)} pods were scheduled, so all are deleted{why}"
    return AttemptResult(AttemptReason.PLACEMENT_TIMED_OUT, sentence, NotCounted())


def _is_refused_in_part(view: JobView) -> bool:
    """Pods that exist count against a quota, for example, in which another job waits for room.

    Without a refusal, missing pods are about to be created, by an operator that was away for long.
    """
    return bool(view.missing) and refusal(view) is not None


def placement_retry_seconds(first_seconds: float, retries: int, uid: str) -> float:
    """Wait before the pods of the job `uid` are created again, after `retries` failures.

    Up to half longer for some jobs: two that have released their pods at the same time must not try again at the same
    time.
    """
    spread = 1.0 + zlib.crc32(uid.encode()) % 1000 / 2000
    return float(math.ceil(first_seconds * min(2.0 ** min(retries, 10), _LONGEST_RETRY_FACTOR) * spread))
