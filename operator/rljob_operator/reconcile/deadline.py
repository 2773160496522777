"""Two clocks on a job: how long it may run, and how long it is kept after its end."""

from __future__ import annotations

from rljob_api.conditions import AttemptReason, ConditionType
from rljob_memory.recovery import GiveUpReason
from rljob_operator.reconcile.timing import elapsed_seconds
from rljob_operator.reconcile.verdict import AttemptEnd, Failed
from rljob_operator.reconcile.view import JobView, condition_of


def deadline_seconds_left(view: JobView) -> float | None:
    """Seconds until `spec.activeDeadlineSeconds` are over; None without a deadline, or before the start.

    Counted from the start, or from the last time that the job was resumed or was given more steps. While it is
    suspended, the clock stands.
    """
    allowed, begun = view.spec.active_deadline_seconds, view.status.start_time
    if allowed is None or begun is None or view.holds(ConditionType.SUSPENDED):
        return None
    for type_ in (ConditionType.SUSPENDED, ConditionType.COMPLETE):
        condition = condition_of(view.status, type_)
        if condition is not None and condition.status == "False":
            begun = max(begun, condition.last_transition_time)
    return max(0.0, allowed - elapsed_seconds(begun, view.now))


def deadline_exceeded(view: JobView) -> AttemptEnd | None:
    if deadline_seconds_left(view) != 0.0:
        return None
    sentence = (
        f"the job has run for activeDeadlineSeconds: {view.spec.active_deadline_seconds}; "
        "what it committed is on its volume"
    )
    return AttemptEnd(AttemptReason.DEADLINE_EXCEEDED, sentence, Failed(GiveUpReason.DEADLINE_EXCEEDED))


def seconds_to_live(view: JobView) -> float | None:
    """Seconds until a finished job is deleted; None where it is kept."""
    allowed, ended = view.spec.ttl_seconds_after_finished, view.status.completion_time
    return None if allowed is None or ended is None else max(0.0, allowed - elapsed_seconds(ended, view.now))
