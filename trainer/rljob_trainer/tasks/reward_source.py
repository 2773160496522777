"""The reward function that the manifest describes, in a form that another process can load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rljob_api.task import TaskSpec
from rljob_client.errors import BadInput
from rljob_trainer.tasks.built_in import TaskContext, task_module
from rljob_trainer.tasks.rewards import reward_from_manifest
from rljob_trainer.tasks.scoring import Reward


@dataclass(frozen=True, slots=True)
class RewardSource:
    """Describes the reward function of a task. Can be pickled."""

    spec: TaskSpec

    manifest_directory: Path
    """Python modules are relative to it."""

    seed: int
    """Seed of the items, which a verifier may need."""

    @property
    def may_hang(self) -> bool:
        """False for rewards that need no process of their own: they run no foreign code on the response."""
        return self.spec.reward is not None or self.spec.name != "digits"

    def load(self) -> Reward:
        """The reward function. Raises `BadInput` if it cannot be loaded, or if the task has none."""
        spec = self.spec
        if spec.reward:
            return reward_from_manifest(spec.reward, spec.answer, self.manifest_directory)
        if spec.has_own_reward:
            context = TaskContext(self.manifest_directory, self.seed)
            reward: Reward = task_module(spec.name).reward(spec.typed_args(), spec.answer, context)
            return reward
        raise BadInput(
            f"task.reward: expected a reward function for the task {spec.name}, found none; write module:function"
        )
