"""A family of remedies: one setting of the plan, and the values that it can take next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import RemedyLevel, Role
from rljob_memory.diagnosis import FailureClass
from rljob_memory.plan_settings import name_of, text_of
from rljob_memory.recovery.failure import Case
from rljob_memory.recovery.state import NOT_OF_THE_PLAN


@dataclass(frozen=True, slots=True)
class Change:
    """The next value of a family's setting."""

    value: object
    expected_bytes: int | None
    """Memory that it frees, or adds if the setting is an upper bound; None if that cannot be estimated."""
    before: object = None
    """The present value, if the plan leaves it open; None: the plan has it."""


@dataclass(frozen=True, slots=True)
class Family:
    """One setting and everything that is known about changing it."""

    setting: str
    """Field of the plan, or one of `NOT_OF_THE_PLAN`."""
    acts_on: frozenset[FailureClass]
    """Classes whose cause it can remove or lessen; none for the last resort."""
    level: RemedyLevel
    """Level that its change needs if no process is dead."""
    owner: Role | None
    """Role whose processes have the setting; None: the pods have it."""
    next_change: Callable[[Case], Change | None]
    """The next value for a failure; None if the family can do nothing about it, or nothing more."""
    bound: Callable[[Case], str | None] = lambda _: None
    """Value to write in the manifest, as a line, if only a bound there prevents a change."""

    @property
    def name(self) -> str:
        """The setting as spelled in the manifest and in the status."""
        return name_of(self.setting) if self.of_the_plan else self.setting

    @property
    def of_the_plan(self) -> bool:
        """True if it changes the plan, as new processes do not."""
        return self.setting not in NOT_OF_THE_PLAN

    def text_before(self, change: Change, plan: MemoryPlan) -> str:
        """The value that `change` replaces in `plan`."""
        return self.text_in(plan) if change.before is None else self.text_of(change.before)

    def text_in(self, plan: MemoryPlan) -> str:
        """Its value in `plan`, as the manifest writes it."""
        return self.text_of(getattr(plan, self.setting)) if self.of_the_plan else "kept"

    def text_of(self, value: object) -> str:
        """`value` as the manifest writes it."""
        return text_of(self.setting, value)
