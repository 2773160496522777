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
    PLACEMENT_TIMED_OUT = "PlacementTimedOut"
    RESTARTING = "Restarting"
    RESUMED = "Resumed"
    STEPS_RAISED = "StepsRaised"
    STEP_REPORT_IGNORED = "StepReportIgnored"
    SUSPENDED = "Suspended"
