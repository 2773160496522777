"""Writes of the status: the columns of `kubectl get`, and the changes that are worth a write."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from rljob_api.conditions import ConditionType
from rljob_api.status import RLJobStatus, StatusDisplay
from rljob_operator.reconcile.timing import elapsed_seconds
from rljob_operator.reconcile.view import condition_of


def wait_before_write(
    stored: RLJobStatus, drafted: RLJobStatus, interval_seconds: float, now: datetime
) -> float | None:
    """Seconds to wait with the write of `drafted`; None if there is nothing to write.

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


_PHASES = {
    ConditionType.COMPLETE: "Complete",
    ConditionType.FAILED: "Failed",
    ConditionType.SUSPENDED: "Suspended",
    ConditionType.RECOVERING: "Recovering",
    ConditionType.RUNNING: "Running",
}
"""The phase is that of the first condition that holds."""


def display(status: RLJobStatus) -> StatusDisplay:
    memory = status.memory
    return StatusDisplay(
        phase=phase(status),
        step=f"{status.step or 0}/{status.steps}" if status.steps else "",
        reward="" if status.reward is None else f"{status.reward:.4g}",
        peak=_gibibytes(memory.peak_reserved_bytes) if memory else "",
        headroom=_gibibytes(memory.headroom_bytes) if memory else "",
    )


def phase(status: RLJobStatus) -> str:
    for type_, name in _PHASES.items():
        condition = condition_of(status, type_)
        if condition is not None and condition.status == "True":
            return name
    return "Pending"


def _gibibytes(count: int) -> str:
    return f"{count / 2**30:.1f}Gi"
