"""What is asked of `decide`, beside the failure itself, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import get_args

from rljob_api.memory_plan import MemoryPlan
from rljob_api.memory_profile import MemoryProfile
from rljob_api.memory_settings import MemorySettings
from rljob_api.plan_change import DiagnosisStatus, RemedyLevel, RemedyStatus, Role
from rljob_api.recovery import RecoverySpec

LEVELS: tuple[RemedyLevel, ...] = get_args(RemedyLevel)
"""The cheapest first."""


@dataclass(frozen=True, slots=True)
class Latitude:
    """What may be changed, and what the caller can do at all.

    `settings`, `recovery`: of the job's spec. `facts`: None where no trainer reported them. `levels`: what the caller
    can bring into force. A remedy of a lower level comes into force by the lowest of them that is higher: what a live
    process could take, new containers take as well. `supported_settings`: settings of the plan that another trainer
    reads, spelled as in the manifest; None: all. `host_memory_limit_bytes`, `shared_memory_bytes`: of the failed pod.
    `node`: where the failed process ran; None where it can run nowhere else.
    """

    settings: MemorySettings
    recovery: RecoverySpec
    facts: MemoryProfile | None
    levels: frozenset[RemedyLevel]
    supported_settings: frozenset[str] | None = None
    host_memory_limit_bytes: int | None = None
    shared_memory_bytes: int | None = None
    node: str | None = None

    @property
    def supervised(self) -> bool:
        """Whether somebody stands behind the caller who can do more: whoever cannot restart everything has one."""
        return not self.levels & {"RestartInPlace", "ReplacePods"}

    def level_in_force(self, needed: RemedyLevel) -> RemedyLevel | None:
        """The lowest level of the caller's that does what `needed` does; None where that is beyond it."""
        return next((level for level in LEVELS[LEVELS.index(needed) :] if level in self.levels), None)


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change of the plan. `plan`: the next one. `level`: what it takes to come into force. `respawn`: the roles
    whose processes have to be new for it; empty at level Live. `diagnosis`: the cause that it answers. `sentence`: what
    is changed, for people."""

    plan: MemoryPlan
    status: RemedyStatus
    level: RemedyLevel
    diagnosis: DiagnosisStatus
    sentence: str
    respawn: frozenset[Role] = frozenset()


class GiveUpReason(StrEnum):
    """Why no change of the plan follows. The first three are reasons of the condition Failed."""

    ADJUSTMENTS_EXHAUSTED = "AdjustmentsExhausted"
    PINNED_SETTING_CONFLICT = "PinnedSettingConflict"
    NO_PROGRESS = "NoProgress"
    NOTHING_LEFT = "NothingLeft"
    LEFT_TO_SUPERVISOR = "LeftToSupervisor"


@dataclass(frozen=True, slots=True)
class GiveUp:
    """`sentence`: the full account: what was tried, what each change freed, what to change in the manifest."""

    reason: GiveUpReason
    sentence: str
