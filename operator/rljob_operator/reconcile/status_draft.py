"""The draft of the status: starts from the stored one, is changed by the stages, and compared at the end."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_api.status import MAX_ATTEMPTS_KEPT, AttemptStatus, Condition, RLJobStatus
from rljob_operator.reconcile.desired import EventNote

_LONGEST_MESSAGE = 32_768

_INITIAL: dict[ConditionType, tuple[ConditionReason, str]] = {
    ConditionType.SUSPENDED: (ConditionReason.NOT_SUSPENDED, "spec.suspend is false"),
    ConditionType.SCHEDULED: (ConditionReason.WAITING_FOR_PODS, "the pods are being created"),
    ConditionType.RUNNING: (ConditionReason.STARTING, "the pods have not started"),
    ConditionType.MEMORY_PRESSURE: (ConditionReason.ENOUGH_MEMORY, "no out-of-memory failure is projected"),
    ConditionType.DEGRADED: (ConditionReason.NO_WARNING, "the last step has no warning"),
    ConditionType.RECOVERING: (ConditionReason.NO_FAILURE, "nothing has failed"),
    ConditionType.COMPLETE: (ConditionReason.STEPS_REMAIN, "not all steps are committed"),
    ConditionType.FAILED: (ConditionReason.NO_FAILURE, "nothing has failed"),
    ConditionType.READY: (ConditionReason.PENDING, "the pods are being created"),
    ConditionType.STALLED: (ConditionReason.NOT_STALLED, "no change by a person is needed"),
}


class StatusDraft:
    """The new status, and the Events that belong to it."""

    def __init__(self, stored: RLJobStatus, generation: int, now: datetime) -> None:
        self.status = stored
        self.events: list[EventNote] = []
        self.invalid_spec: str | None = None
        """Error in the present spec, which no attempt can use."""
        self._generation = generation
        self._now = now
        self._stored = {condition.type: condition for condition in stored.conditions}
        self._conditions = dict(self._stored)
        for type_ in ConditionType:
            if type_ not in self._conditions:
                self.reset(type_)
        self.set(observed_generation=generation)
        self._keep_conditions()

    def set(self, **fields: Any) -> None:
        self.status = self.status.model_copy(update=fields)

    # --- conditions ---

    def condition(self, type_: ConditionType, holds: bool, reason: str, message: str) -> None:
        """Set a condition. Its transition time changes only if its status differs from the stored one."""
        status: Literal["True", "False"] = "True" if holds else "False"
        stored = self._stored.get(type_)
        same_status = stored is not None and stored.status == status
        drafted = Condition(
            type=type_.value,
            status=status,
            reason=str(reason),
            message=clipped(message, _LONGEST_MESSAGE),
            last_transition_time=stored.last_transition_time if stored and same_status else self._now,
            observed_generation=self._generation,
        )
        self._conditions[type_] = drafted
        self._keep_conditions()

    def reset(self, type_: ConditionType) -> None:
        """Set the condition to its value before the start of a job."""
        self.condition(type_, False, *_INITIAL[type_])

    def holds(self, type_: ConditionType) -> bool:
        return self._conditions[type_].status == "True"

    def held(self, type_: ConditionType) -> bool:
        """The condition is true in the stored status."""
        stored = self._stored.get(type_)
        return stored is not None and stored.status == "True"

    def reason(self, type_: ConditionType) -> str:
        return self._conditions[type_].reason

    def message(self, type_: ConditionType) -> str:
        return self._conditions[type_].message

    def observe_generation(self) -> None:
        """Record that every condition takes the present spec into account, which `kubectl wait` checks."""
        for type_, condition in self._conditions.items():
            self._conditions[type_] = condition.model_copy(update={"observed_generation": self._generation})
        self._keep_conditions()

    def _keep_conditions(self) -> None:
        self.set(conditions=[self._conditions[type_] for type_ in ConditionType if type_ in self._conditions])

    # --- attempts ---

    @property
    def attempt(self) -> AttemptStatus | None:
        """The latest."""
        return self.status.attempts[-1] if self.status.attempts else None

    def begin_attempt(self, attempt: AttemptStatus) -> None:
        self.set(attempts=[*self.status.attempts, attempt][-MAX_ATTEMPTS_KEPT:])

    def change_attempt(self, **fields: Any) -> None:
        """Change the record of the latest attempt."""
        *earlier, latest = self.status.attempts
        self.set(attempts=[*earlier, latest.model_copy(update=fields)])

    # --- Events ---

    def event(self, type_: Literal["Normal", "Warning"], reason: EventReason, message: str) -> None:
        self.events.append(EventNote(type_, reason.value, message))


def clipped(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


class EventReason(StrEnum):
    ATTEMPT_STARTED = "AttemptStarted"
    CONTROLLER_ON_GPU_NODE = "ControllerOnGpuNode"
    DEGRADED = "Degraded"
    FOREIGN_OBJECT = "ForeignObject"
    FOREIGN_POD_IGNORED = "ForeignPodIgnored"
    INVALID_SPEC = "InvalidSpec"
    JOB_COMPLETED = "JobCompleted"
    JOB_FAILED = "JobFailed"
    MANAGED_BY_ANOTHER_OPERATOR = "ManagedByAnotherOperator"
    MEMORY_PRESSURE = "MemoryPressure"
    NODE_LOST = "NodeLost"
    OBJECT_LEFT_BEHIND = "ObjectLeftBehind"
    OUT_OF_MEMORY = "OutOfMemory"
    PLACEMENT_TIMED_OUT = "PlacementTimedOut"
    PLAN_CHANGED = "PlanChanged"
    POD_NOT_TERMINATING = "PodNotTerminating"
    POD_REMOVED = "PodRemoved"
    POD_REPLACED = "PodReplaced"
    REPLACING_POD = "ReplacingPod"
    RECONCILE_ERROR = "ReconcileError"
    RECOVERED = "Recovered"
    RESTARTING = "Restarting"
    RESUMED = "Resumed"
    STEPS_RAISED = "StepsRaised"
    STEP_OVERDUE = "StepOverdue"
    STEP_REPORT_IGNORED = "StepReportIgnored"
    SUSPENDED = "Suspended"
