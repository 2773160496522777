"""Answers to a failure: a changed memory plan, a restart under the same plan, or giving up."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import PlanChange, Role
from rljob_memory.recovery.state import RecoveryState


@dataclass(frozen=True, slots=True)
class Changed:
    """The job continues under a changed plan."""

    change: PlanChange
    """Ready to be written down, which comes before anything acts on it."""
    plan: MemoryPlan
    """The plan that it leads to."""
    state: RecoveryState
    """After the change."""
    renew: frozenset[Role]
    """Roles that need new processes; empty at level Live. From level RestartInPlace on, everything is renewed."""
    message: str
    """The cause and the change, for people."""


@dataclass(frozen=True, slots=True)
class Restart:
    """The job continues with new processes, under the same plan."""

    state: RecoveryState
    """After the restart, which counts."""
    cause: str
    """The failure, and why the plan is not changed."""
    message: str
    """The cause and the count, for people."""
    of_one_process: bool = False
    """Only the lost process is replaced, in the same attempt. False: another attempt follows."""


class GiveUpReason(StrEnum):
    """Reasons to give up. All but the last two are reasons of the condition Failed."""

    ADJUSTMENTS_EXHAUSTED = "AdjustmentsExhausted"
    PINNED_SETTING_CONFLICT = "PinnedSettingConflict"
    NO_PROGRESS = "NoProgress"
    RESTARTS_EXHAUSTED = "RestartsExhausted"
    BAD_INPUT = "BadInput"
    TRAINER_ERROR = "TrainerError"
    POD_CANNOT_START = "PodCannotStart"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    NOTHING_LEFT = "NothingLeft"
    LEFT_TO_SUPERVISOR = "LeftToSupervisor"


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The caller stops recovering."""

    reason: GiveUpReason
    explanation: str
    """The failure, every change that was tried, with its effect, and the changes of the manifest that help."""


Response = Changed | Restart | GiveUp
