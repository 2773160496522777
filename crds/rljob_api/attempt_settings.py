"""Settings of one attempt: the file that the operator writes for the pods of RLJob's own trainer."""

from __future__ import annotations

from pydantic import Field

from rljob_api.api_model import ApiModel, PositiveCount
from rljob_api.memory_plan import MemoryPlan
from rljob_api.memory_profile import StartingProfile
from rljob_api.plan_change import PlanChange
from rljob_api.status import Role


class AttemptSettings(ApiModel):
    """All settings that differ between attempts in the same pods. They are one file, so that no reader mixes two
    versions."""

    attempt: PositiveCount
    """Number of the attempt."""

    memory_plan: MemoryPlan | None = None
    """Absent until the trainer has computed its first plan."""

    memory_profile: StartingProfile | None = None
    """The profile that the plan of generation 1 was made from, if there was one."""

    plan_changes: list[PlanChange] = Field(default_factory=list)
    """The latest changes that led to the plan, oldest first."""

    policy_environment: dict[str, str] | None = None
    """Variables of the CUDA allocator for the policy processes. Absent: the defaults for the image's torch."""

    rollout_environment: dict[str, str] | None = None
    """The same for the engine processes."""

    @property
    def allocator_environments(self) -> dict[Role, dict[str, str]]:
        """Variables of the CUDA allocator by role, without roles that have the defaults."""
        environments: dict[Role, dict[str, str] | None] = {
            "policy": self.policy_environment,
            "rollout": self.rollout_environment,
        }
        return {role: variables for role, variables in environments.items() if variables is not None}

    @property
    def plan_generation(self) -> int:
        """Generation of the plan. The first one, which the trainer computes, is 1."""
        return self.memory_plan.generation if self.memory_plan else 1
