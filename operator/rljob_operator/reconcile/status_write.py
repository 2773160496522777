"""Whether a status is worth a write to the API server. Steps pass by the second; a job's conditions do not."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from rljob_api.status import RLJobStatus
from rljob_operator.reconcile.timing import elapsed_seconds


def wait_before_write(
    stored: RLJobStatus, drafted: RLJobStatus, interval_seconds: float, now: datetime
) -> float | None:
    """Seconds to wait with the write of `drafted`; None where there is nothing to write.

    What a decision rests on, or a person waits for, is written at once. Progress and the wording of messages wait until
    `interval_seconds` have passed since the last write.
    """
    if _without_time(stored) == _without_time(drafted):
        return None
    if stored.update_time is None or _essence(stored) != _essence(drafted):
        return 0.0
    return max(0.0, interval_seconds - elapsed_seconds(stored.update_time, now))


def _without_time(status: RLJobStatus) -> RLJobStatus:
    return status.model_copy(update={"update_time": None})


def _essence(status: RLJobStatus) -> RLJobStatus:
    """The status without what may wait."""
    progress: dict[str, Any] = {"step": None, "reward": None, "memory": None, "plan": None, "pods": [], "display": None}
    wording = {
        "conditions": [
            condition.model_copy(update={"message": "", "observed_generation": None}) for condition in status.conditions
        ]
    }
    return _without_time(status).model_copy(update=progress | wording)
