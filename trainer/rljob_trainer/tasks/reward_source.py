"""The reward functions that the manifest describes, in a form that another process can load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_api.built_in_rewards import BUILT_IN_REWARDS, BuiltInReward
from rljob_api.reward import RewardSpec
from rljob_api.task import TaskSpec
from rljob_client.errors import BadInput
from rljob_trainer.rewards import built_in_function
from rljob_trainer.tasks.built_in import TaskContext, task_module
from rljob_trainer.tasks.python_functions import load_function
from rljob_trainer.tasks.rewards import USER_FUNCTION, Reward, with_signature


@dataclass(frozen=True, slots=True)
class RewardSource:
    """Describes the reward functions of a task. Can be pickled."""

    spec: TaskSpec

    manifest_directory: Path
    """Python modules are relative to it."""

    seed: int
    """Seed of the items, which a verifier may need."""

    @property
    def may_hang(self) -> bool:
        """False for rewards that need no process of their own: they run no foreign code on the response."""
        return self.modules != [] or self.spec.name != "digits" or self.spec.rewards is not None

    @property
    def modules(self) -> list[str]:
        """Modules of the user's functions."""
        return [each.source.partition(":")[0] for each in self.spec.reward_functions if ":" in each.source]

    def load(self) -> list[Reward]:
        """The reward functions. Raises `BadInput` if one cannot be loaded, or if the task has none."""
        return [self._load(spec) for spec in self.spec.reward_functions]

    def _load(self, spec: RewardSpec) -> Reward:
        name, function, built_in = self._function(spec)
        reward = Reward(
            name=name if spec.name in (None, spec.source) else f"{spec.name} ({name})",
            function=function,
            arguments=spec.args if ":" in spec.source or spec.source == "task" else {"args": spec.typed_args()},
            answer_spec=self.spec.answer,
            label=spec.label,
            weight=spec.weight,
            built_in=built_in,
        )
        return with_signature(reward, spec.batch)

    def _function(self, spec: RewardSpec) -> tuple[str, Callable[..., Any], BuiltInReward]:
        """The function with its name in messages."""
        if ":" in spec.source:
            return spec.source, load_function(spec.source, self.manifest_directory), USER_FUNCTION
        row = BUILT_IN_REWARDS[spec.source]
        if row.module:
            return spec.source, built_in_function(spec.source), row
        if self.spec.has_own_reward:
            context = TaskContext(self.manifest_directory, self.seed)
            return self.spec.name, task_module(self.spec.name).reward(self.spec.typed_args(), context), row
        raise BadInput(
            f"task.reward: expected a reward function for the task {self.spec.name}, found none; write module:function"
        )
