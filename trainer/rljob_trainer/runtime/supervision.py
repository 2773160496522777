"""The process that starts an attempt: the operator, with the state of earlier attempts, or `rljob run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import PlanChange, RemedyLevel
from rljob_api.status import Role


@dataclass(frozen=True, slots=True)
class Supervision:
    """State and abilities of the process that starts the attempt."""

    attempt: int | None = None
    """Its number for the attempt; None: the ledger's."""

    plan: MemoryPlan | None = None
    """The plan from earlier attempts; None: there is none."""

    changes: Sequence[PlanChange] = ()
    """Plan changes from earlier attempts, oldest first."""

    levels: frozenset[RemedyLevel] = frozenset({"Live", "RespawnRole", "RestartInPlace"})
    """Levels of plan changes that can be applied without outside help."""

    allocator_environments: Mapping[Role, Mapping[str, str]] = field(default_factory=dict)
    """Environment variables of the CUDA allocator, for roles whose defaults are overridden."""

    @property
    def by_operator(self) -> bool:
        """An operator makes the changes that need new containers; otherwise this process does, on one machine."""
        return "RestartInPlace" not in self.levels
