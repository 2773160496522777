"""What `kubectl get rljobs` prints."""

from __future__ import annotations

from rljob_api.conditions import ConditionType
from rljob_api.status import RLJobStatus, StatusDisplay
from rljob_operator.reconcile.view import condition_of

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
