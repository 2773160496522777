"""Rewards and advantages of the completions of a step, or of a part of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rljob_api.job import RLJobSpec
from rljob_client.run_directory.ledger import Ledger
from rljob_trainer.algorithms.advantages import AdvantageFunction, scored
from rljob_trainer.display.run_display import RunDisplay
from rljob_trainer.rewards.overlong import overlong_penalty
from rljob_trainer.rollout_batch import RolloutBatch
from rljob_trainer.run_listener import RunListener
from rljob_trainer.runtime.step_health import is_power_of_two
from rljob_trainer.runtime.step_rollouts import GeneratedRollouts
from rljob_trainer.tasks.step_rewards import StepRewards, step_rewards
from rljob_trainer.tasks.task import Task


@dataclass(frozen=True, slots=True)
class StepScoring:
    """Waits for the rewards of the task, and computes advantages from them."""

    spec: RLJobSpec
    task: Task
    advantage: AdvantageFunction
    ledger: Ledger
    display: RunDisplay
    listener: RunListener

    def score(self, step: int, generated: GeneratedRollouts) -> RolloutBatch:
        """The completions of the whole step with their rewards and advantages, which it reports."""
        batch, found = self.scored(step, generated)
        if (missing := generated.metrics.get("missing_groups")) and self._is_due("missing_groups"):
            self.display.warning(
                f"step {step}: {missing:.0f} of {len(batch.prompt_ids)} groups have equal rewards, also after "
                f"{generated.metrics['sampling_rounds']:.0f} rounds of dynamic sampling"
            )
        if found.failures and self._is_due("reward_errors"):
            self.display.warning(
                f"step {step}: {found.failures} of {len(batch)} rewards are 0, since {found.first_failure}"
            )
        self.listener.step_scored(batch, generated.prompts, generated.completions)
        return batch

    def scored(self, step: int, generated: GeneratedRollouts) -> tuple[RolloutBatch, StepRewards]:
        """The completions with rewards and advantages."""
        algorithm, completions = self.spec.algorithm, generated.completions
        batch, found = self.rewarded(step, generated)
        rewards, metrics = batch.rewards, dict(generated.metrics)
        if (penalty := algorithm.overlong_penalty) is not None:
            lengths = [len(completion.token_ids) for completion in completions]
            penalties = overlong_penalty(lengths, algorithm.max_response_tokens, penalty.buffer_tokens, penalty.factor)
            rewards, metrics["overlong_penalty"] = rewards + penalties, float(penalties.mean())
        batch = scored(batch, rewards, self.advantage, algorithm.settings, found.failures)
        return replace(batch, prompts_drawn=generated.prompts_drawn, metrics=metrics), found

    def rewarded(self, step: int, generated: GeneratedRollouts) -> tuple[RolloutBatch, StepRewards]:
        """The completions with the rewards of the task, and without advantages."""
        algorithm, on_error = self.spec.algorithm, self.spec.task.on_reward_error
        prompts, completions = generated.prompts, generated.completions
        results = generated.rewards.results(stop_at_failure=on_error == "Fail")
        found = step_rewards(self.task, prompts, completions, results, on_error)
        batch = replace(
            RolloutBatch.of(step, algorithm.group_size, prompts, completions),
            reward_parts={name: np.asarray(part, np.float32) for name, part in found.parts.items()},
            kept=np.asarray(found.kept, np.bool_),
        )
        if algorithm.mask_truncated:
            batch = replace(batch, kept=batch.takes_part & batch.finished)
        return replace(batch, rewards=np.asarray(found.rewards, np.float32)), found

    def _is_due(self, metric: str) -> bool:
        """True for the first step with this metric, the second, the fourth, and so on: a warning in each would hide the
        others."""
        return is_power_of_two(sum(record.metrics.get(metric, 0) > 0 for record in self.ledger.steps) + 1)
