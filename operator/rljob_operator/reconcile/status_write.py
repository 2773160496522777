"""Writes of the status: the columns of `kubectl get`, and the changes that are worth a write."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rljob_api.conditions import ConditionType
from rljob_api.status import RemedyStatus, RLJobStatus, StatusDisplay
from rljob_operator.reconcile.timing import elapsed_seconds
from rljob_operator.reconcile.view import condition_of


@dataclass(frozen=True, slots=True)
class StatusWrite:
    """When a drafted status is written."""

    wait_seconds: float | None
    """0: now. None: there is nothing to write."""
    is_delayed: bool = False
    """A change that is worth an immediate write waits, because the job has written too often."""


def due_write(
    stored: RLJobStatus, drafted: RLJobStatus, interval_seconds: float, budget_seconds: float, now: datetime
) -> StatusWrite:
    """When `drafted` is written over `stored`.

    The basis of a decision is written at once. A change that a person waits for waits `budget_seconds`, which is 0
    unless the job has written too often. Progress and the wording of messages also wait until `interval_seconds` have
    passed since the last write.
    """
    if _without_time(stored) == _without_time(drafted):
        return StatusWrite(None)
    if stored.update_time is None:
        return StatusWrite(0.0)
    before, after = _essence(stored), _essence(drafted)
    if before == after:
        return StatusWrite(max(budget_seconds, interval_seconds - elapsed_seconds(stored.update_time, now)))
    if _basis(before) != _basis(after):
        return StatusWrite(0.0)
    return StatusWrite(budget_seconds, is_delayed=budget_seconds > 0)


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


_REPORTING = (
    ConditionType.MEMORY_PRESSURE,
    ConditionType.DEGRADED,
    ConditionType.RECOVERING,
    ConditionType.READY,
    ConditionType.STALLED,
)
"""Conditions that no decision rests on."""


def _basis(essence: RLJobStatus) -> RLJobStatus:
    """The part of an essence that decisions rest on: not what the trainer alone reports, which is merged again in each
    reconcile."""
    conditions = [
        condition.model_copy(update={"reason": ""}) if condition.type == ConditionType.RUNNING else condition
        for condition in essence.conditions
        if condition.type not in _REPORTING
    ]
    attempts = [
        attempt.model_copy(update={"diagnosis": None, "remedy": attempt.remedy and _ANY_REMEDY})
        for attempt in essence.attempts
    ]
    reported: dict[str, Any] = {"plan_changes": [], "adjustments": 0, "last_out_of_memory": None}
    return essence.model_copy(
        update={"conditions": conditions, "attempts": attempts, "observed_generation": None} | reported
    )


_ANY_REMEDY = RemedyStatus(setting="", before="", after="")


def display(status: RLJobStatus) -> StatusDisplay:
    memory = status.memory
    ready = condition_of(status, ConditionType.READY)
    return StatusDisplay(
        phase=ready.reason if ready else "",
        step=_step(status.step or 0, status.steps),
        reward="" if status.reward is None else f"{status.reward:.4g}",
        peak=_gibibytes(memory.peak_reserved_bytes) if memory else "",
        headroom=_gibibytes(memory.headroom_bytes) if memory else "",
    )


def _step(step: int, steps: int | None) -> str:
    """`3/10`; only the committed steps if the spec now asks for fewer."""
    if not steps:
        return ""
    return f"{step}/{steps}" if step <= steps else str(step)


def _gibibytes(count: int) -> str:
    return f"{count / 2**30:.1f}Gi"
