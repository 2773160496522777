"""What each family of remedies says of itself. A family is one setting of the plan and the values it can take next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import RemedyLevel, Role
from rljob_memory.diagnosis import FailureClass
from rljob_memory.recovery.case import Case
from rljob_memory.recovery.history import PROCESSES
from rljob_memory.recovery.plan_text import name_of, texts_of


@dataclass(frozen=True, slots=True)
class Change:
    """`value`: the setting's next. `expected_bytes`: what that frees; None where that cannot be told. `words`: what is
    changed, for people. `gives_more`: nothing is freed, there is more: `expected_bytes` more."""

    value: object
    expected_bytes: int | None
    words: str
    gives_more: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """`acts_on`: the classes whose cause it can end or lessen. `level`: what its setting takes to come into force where
    the failed process lives on. `owner`: the role whose processes have the setting; None: the pods have it.
    `next_change`: None where it can do nothing in this case, or no more. `bound`: what to write in the manifest where
    nothing but a bound there keeps it from more; None elsewhere."""

    setting: str
    acts_on: frozenset[FailureClass]
    level: RemedyLevel
    owner: Role | None
    next_change: Callable[[Case], Change | None]
    bound: Callable[[Case], str | None] = lambda _: None

    @property
    def name(self) -> str:
        """The setting as the manifest and the status spell it."""
        return name_of(self.setting) if self.of_the_plan else self.setting

    @property
    def of_the_plan(self) -> bool:
        """Whether it changes a value of the plan; fresh processes change none."""
        return self.setting != PROCESSES

    def text_in(self, plan: MemoryPlan) -> str:
        """Its value in `plan`, as the status tells it."""
        return texts_of(plan)[self.name] if self.of_the_plan else "kept"
