"""The size of a status. The API server stores an object of at most 1.5 MiB, and the spec and its own records count."""

from __future__ import annotations

from rljob_api.status import AttemptStatus, Condition, RLJobStatus
from rljob_operator.reconcile.status_draft import clipped

MAX_STATUS_BYTES = 512_000
_LONGEST_MESSAGE = 4096
"""Of a condition. The API allows more."""


def bounded(status: RLJobStatus) -> RLJobStatus:
    """The status in at most MAX_STATUS_BYTES of JSON: without what only earlier attempts needed, and without the oldest
    records of attempts and plan changes if it is still too large. The latest of each always stay."""
    if any(attempt.restarts_before for attempt in status.attempts[:-1]):
        *earlier, latest = status.attempts
        status = status.model_copy(update={"attempts": [*map(_without_restarts, earlier), latest]})
    if any(len(condition.message) > _LONGEST_MESSAGE for condition in status.conditions):
        status = status.model_copy(update={"conditions": list(map(_with_short_message, status.conditions))})
    while _size_bytes(status) > MAX_STATUS_BYTES and (oldest := _oldest_record(status)):
        status = status.model_copy(update={oldest: getattr(status, oldest)[1:]})
    return status


def _with_short_message(condition: Condition) -> Condition:
    return condition.model_copy(update={"message": clipped(condition.message, _LONGEST_MESSAGE)})


def _without_restarts(attempt: AttemptStatus) -> AttemptStatus:
    return attempt.model_copy(update={"restarts_before": {}})


def _oldest_record(status: RLJobStatus) -> str | None:
    """Name of the list that has the oldest record; None if only the latest records are left."""
    attempts, changes = status.attempts, status.plan_changes
    if len(changes) > 1 and (len(attempts) <= 1 or changes[0].attempt <= attempts[0].number):
        return "plan_changes"
    return "attempts" if len(attempts) > 1 else None


def _size_bytes(status: RLJobStatus) -> int:
    return len(status.model_dump_json(by_alias=True, exclude_none=True).encode())
