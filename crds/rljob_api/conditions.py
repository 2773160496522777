"""Types and reasons of `status.conditions`, and reasons of `status.attempts`."""

from __future__ import annotations

from enum import StrEnum


class ConditionType(StrEnum):
    """Types of conditions."""

    SUSPENDED = "Suspended"
    FITS = "Fits"
    SCHEDULED = "Scheduled"
    RUNNING = "Running"
    MEMORY_PRESSURE = "MemoryPressure"
    DEGRADED = "Degraded"
    RECOVERING = "Recovering"
    COMPLETE = "Complete"
    FAILED = "Failed"
    READY = "Ready"
    STALLED = "Stalled"


class ConditionReason(StrEnum):
    """Reasons of conditions, grouped by the type that they belong to."""

    # Suspended
    NOT_SUSPENDED = "NotSuspended"
    SUSPEND_REQUESTED = "SuspendRequested"
    RESUMED = "Resumed"
    # Fits; and StepsCommitted, as of Running
    PREDICTED_TO_FIT = "PredictedToFit"
    DOES_NOT_FIT = "DoesNotFit"
    MODEL_UNKNOWN = "ModelUnknown"
    NODES_UNKNOWN = "NodesUnknown"
    OTHER_TRAINER = "OtherTrainer"
    NOT_PREDICTED = "NotPredicted"
    # Scheduled
    NOT_ADMITTED = "NotAdmitted"
    WAITING_FOR_PODS = "WaitingForPods"
    WAITING_FOR_QUEUE = "WaitingForQueue"
    WAITING_TO_RESTART = "WaitingToRestart"
    GANG_SCHEDULER_MISSING = "GangSchedulerMissing"
    NO_GPU_FREE_NODE = "NoGpuFreeNode"
    UNSCHEDULABLE = "Unschedulable"
    PODS_REFUSED = "PodsRefused"
    MISSING_OBJECT = "MissingObject"
    FOREIGN_OBJECT = "ForeignObject"
    FOREIGN_POD = "ForeignPod"
    OBJECT_LEFT_BEHIND = "ObjectLeftBehind"
    NAMESPACE_TERMINATING = "NamespaceTerminating"
    PLACEMENT_TIMED_OUT = "PlacementTimedOut"
    NODE_LOST = "NodeLost"
    POD_NOT_TERMINATING = "PodNotTerminating"
    CONTROLLER_ON_GPU_NODE = "ControllerOnGpuNode"
    PODS_SCHEDULED = "PodsScheduled"
    # Running
    STARTING = "Starting"
    POD_CANNOT_START = "PodCannotStart"
    STEPS_COMMITTED = "StepsCommitted"
    STEP_OVERDUE = "StepOverdue"
    STEP_REPORT_IGNORED = "StepReportIgnored"
    STOPPING = "Stopping"
    PODS_TERMINATED = "PodsTerminated"
    # MemoryPressure
    MEMORY_RUNNING_OUT = "MemoryRunningOut"
    ENOUGH_MEMORY = "EnoughMemory"
    LIMIT_BELOW_PREDICTION = "LimitBelowPrediction"
    # Degraded; its other reasons are those of `TrainingWarning`
    NO_WARNING = "NoWarning"
    # Recovering
    NO_FAILURE = "NoFailure"
    MEMORY_PLAN_CHANGED = "MemoryPlanChanged"
    SAME_PLAN_RESTART = "SamePlanRestart"
    PODS_DISRUPTED = "PodsDisrupted"
    RECOVERED = "Recovered"
    GIVEN_UP = "GivenUp"
    # Complete
    STEPS_REMAIN = "StepsRemain"
    STEPS_RAISED = "StepsRaised"
    ALL_STEPS_COMMITTED = "AllStepsCommitted"
    # Failed; and Resumed, as of Suspended
    BAD_INPUT = "BadInput"
    ADJUSTMENTS_EXHAUSTED = "AdjustmentsExhausted"
    PINNED_SETTING_CONFLICT = "PinnedSettingConflict"
    RESTARTS_EXHAUSTED = "RestartsExhausted"
    NO_PROGRESS = "NoProgress"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    TRAINER_ERROR = "TrainerError"
    RECONCILE_ERROR = "ReconcileError"
    # Ready: the phases of a job
    PENDING = "Pending"
    INVALID = "Invalid"
    SUSPENDED = "Suspended"
    RUNNING = "Running"
    RECOVERING = "Recovering"
    COMPLETE = "Complete"
    FAILED = "Failed"
    # Stalled; and the reasons of Failed, ForeignObject and ForeignPod
    NOT_STALLED = "NotStalled"
    INVALID_SPEC = "InvalidSpec"


class AttemptReason(StrEnum):
    """Reasons for the termination of an attempt."""

    ALL_STEPS_COMMITTED = "AllStepsCommitted"
    STEPS_RAISED = "StepsRaised"
    SUSPEND_REQUESTED = "SuspendRequested"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    PLACEMENT_TIMED_OUT = "PlacementTimedOut"
    NOT_RESTARTED_IN_PLACE = "NotRestartedInPlace"
    RESTART_LOOP = "RestartLoop"
    POD_CANNOT_START = "PodCannotStart"
    INIT_CONTAINER_FAILED = "InitContainerFailed"
    EVICTED = "Evicted"
    PODS_DISRUPTED = "PodsDisrupted"
    DEVICE_OUT_OF_MEMORY = "DeviceOutOfMemory"
    HOST_OUT_OF_MEMORY = "HostOutOfMemory"
    SHARED_MEMORY_EXHAUSTED = "SharedMemoryExhausted"
    WORKER_LOST = "WorkerLost"
    BAD_INPUT = "BadInput"
    INVALID_MANIFEST = "InvalidManifest"
    OUTPUT_UNAVAILABLE = "OutputUnavailable"
    INTERRUPTED = "Interrupted"
    ERROR = "Error"
