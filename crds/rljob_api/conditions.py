"""Types and reasons of the conditions in `status.conditions`, and the phases shown to people."""

from __future__ import annotations

from enum import StrEnum


class ConditionType(StrEnum):
    """What can be true of a job."""

    SUSPENDED = "Suspended"
    SCHEDULED = "Scheduled"
    RUNNING = "Running"
    RECOVERING = "Recovering"
    COMPLETE = "Complete"
    FAILED = "Failed"


class ConditionReason(StrEnum):
    """Why a condition has its status."""

    # Suspended
    SUSPEND_REQUESTED = "SuspendRequested"
    WAITING_FOR_QUEUE = "WaitingForQueue"
    RESUMED = "Resumed"
    # Scheduled
    WAITING_FOR_PODS = "WaitingForPods"
    NO_GPU_FREE_NODE = "NoGpuFreeNode"
    CONTROLLER_ON_GPU_NODE = "ControllerOnGpuNode"
    PODS_SCHEDULED = "PodsScheduled"
    # Running
    STARTING = "Starting"
    STEPS_COMMITTED = "StepsCommitted"
    PODS_ENDED = "PodsEnded"
    # Recovering
    MEMORY_PLAN_CHANGED = "MemoryPlanChanged"
    SAME_PLAN_RESTART = "SamePlanRestart"
    RECOVERED = "Recovered"
    # Complete
    ALL_STEPS_COMMITTED = "AllStepsCommitted"
    # Failed
    INVALID_SPEC = "InvalidSpec"
    BAD_INPUT = "BadInput"
    OUTPUT_UNAVAILABLE = "OutputUnavailable"
    ADJUSTMENTS_EXHAUSTED = "AdjustmentsExhausted"
    PINNED_SETTING_IN_THE_WAY = "PinnedSettingInTheWay"
    RESTARTS_EXHAUSTED = "RestartsExhausted"
    NO_PROGRESS = "NoProgress"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    TRAINER_ERROR = "TrainerError"
