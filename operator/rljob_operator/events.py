"""Kubernetes Events: a note for the user, its object, and the reasons of Events about jobs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


@dataclass(frozen=True, slots=True)
class Subject:
    """The object that an Event is about."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class EventNote:
    """A Kubernetes Event. Equal notes are counted in one Event, not repeated."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str
    """At most 1,024 characters."""


# --- Reasons ---


class EventReason(StrEnum):
    ATTEMPT_STARTED = "AttemptStarted"
    CONTROLLER_ON_GPU_NODE = "ControllerOnGpuNode"
    DEGRADED = "Degraded"
    DOES_NOT_FIT = "DoesNotFit"
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
    POD_NOT_RESIZED = "PodNotResized"
    POD_NOT_TERMINATING = "PodNotTerminating"
    POD_REMOVED = "PodRemoved"
    POD_REPLACED = "PodReplaced"
    REPLACING_POD = "ReplacingPod"
    RECONCILE_ERROR = "ReconcileError"
    RECOVERED = "Recovered"
    RESTARTING = "Restarting"
    RESUMED = "Resumed"
    STARTED_FROM_PROFILE = "StartedFromProfile"
    STEPS_RAISED = "StepsRaised"
    STEP_OVERDUE = "StepOverdue"
    STEP_REPORT_IGNORED = "StepReportIgnored"
    SUSPENDED = "Suspended"
