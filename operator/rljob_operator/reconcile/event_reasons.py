"""Reasons of the Events about a job's life."""

from __future__ import annotations

from enum import StrEnum


class EventReason(StrEnum):
    ATTEMPT_STARTED = "AttemptStarted"
    CONTROLLER_ON_GPU_NODE = "ControllerOnGpuNode"
    FOREIGN_POD_IGNORED = "ForeignPodIgnored"
    INVALID_SPEC = "InvalidSpec"
    JOB_COMPLETED = "JobCompleted"
    JOB_FAILED = "JobFailed"
    MEMORY_PRESSURE = "MemoryPressure"
    OUT_OF_MEMORY = "OutOfMemory"
    PLACEMENT_TIMED_OUT = "PlacementTimedOut"
    PLAN_CHANGED = "PlanChanged"
    RECOVERED = "Recovered"
    RESTARTING = "Restarting"
    RESUMED = "Resumed"
    STEPS_RAISED = "StepsRaised"
    STEP_OVERDUE = "StepOverdue"
    STEP_REPORT_IGNORED = "StepReportIgnored"
    SUSPENDED = "Suspended"
