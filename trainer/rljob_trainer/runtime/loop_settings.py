"""Settings of the training loop."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_trainer.tasks.step_rewards import OnRewardError


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """Settings of the loop, from the manifest."""

    steps: int
    prompts_per_step: int
    group_size: int
    scale_advantages: bool
    seed: int
    max_staleness: int = 0
    """1: the rollouts of the next step are generated while the policy learns from those of the present one."""
    partial_rollout_prompts: int = 0
    """Groups that a step may leave for the next one, beyond those that it completes."""
    on_reward_error: OnRewardError = "Fail"
    responses_may_end: bool = True
    """False if every response has full length (`algorithm.ignoreEndOfSequence`)."""
    max_steps_without_learning: int = 0
    """As in `RecoverySpec`; 0: no limit."""
