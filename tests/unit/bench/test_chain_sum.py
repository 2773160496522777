"""The row of a run that learns to add."""

from __future__ import annotations

import pytest

from bench.programs.chain_sum import first_step_at_goal, row
from rljob_trainer.ledger.records import ResponseStatistics, RewardStatistics, StepRecord


def step(number: int, reward: float) -> StepRecord:
    return StepRecord(
        step=number,
        attempt=1,
        reward=RewardStatistics(mean=reward, std=0.0, min=0.0, max=1.0),
        response=ResponseStatistics(mean_tokens=4.0, max_tokens=4, clipped_ratio=1.0),
        seconds={"rollout": 1.0},
        total_seconds=1.0 + number,
        tokens=100,
        metrics={"logprob_diff_mean": 0.01, "importance_weight_mean": 1.0},
        memory_bytes={"policy-0": {"update": 1 << 30}},
        weights_version=number,
    )


def test_a_row_describes_the_rewards_and_seconds_of_a_run() -> None:
    found = row([step(number, number / 10) for number in range(1, 11)], 10)
    assert (found["steps"], found["rewards"][-1]) == (10, 1.0)
    assert (found["first_reward"], found["last_reward"]) == (pytest.approx(0.3), pytest.approx(0.8))
    assert (found["first_step_seconds"], found["median_step_seconds"], found["loop_seconds"]) == (2.0, 6.5, 65.0)
    assert found["peak_memory_gib"]["policy"]["gib"] == 1.0
    assert (found["logprob_diffs"], found["importance_weight_mean"]) == ([0.01] * 10, 1.0)


@pytest.mark.parametrize(
    ("rewards", "step"),
    [([0.9] * 5, 5), ([0.0, *[0.9] * 5], 6), ([0.5, 1.0, 1.0, 1.0, 1.0], 5), ([1.0] * 4, None), ([0.8] * 9, None)],
)
def test_the_goal_is_a_mean_of_five_steps(rewards: list[float], step: int | None) -> None:
    assert first_step_at_goal(rewards) == step
