from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rljob_client.errors import BadInput
from rljob_trainer.algorithm.advantage import ScaleAdvantages, group_advantages, uniform_groups

rewards_of_groups = st.integers(2, 6).flatmap(
    lambda size: arrays(np.float32, (3, size), elements=st.integers(-50, 50).map(float))
)


@given(rewards_of_groups, st.sampled_from(["Group", "None"]))
def test_advantages_are_standard_scores_within_the_group(rewards: np.ndarray, scale: ScaleAdvantages) -> None:
    """With the unbiased standard deviation."""
    expected = rewards - rewards.mean(axis=1, keepdims=True)
    if scale == "Group":
        deviation = rewards.std(axis=1, ddof=1, keepdims=True)
        expected = np.divide(expected, deviation, out=np.zeros_like(expected), where=deviation > 0)
    found = group_advantages(rewards.reshape(-1), rewards.shape[1], scale=scale)
    np.testing.assert_allclose(found, expected.reshape(-1), rtol=1e-4, atol=1e-4)
    assert uniform_groups(rewards.reshape(-1), rewards.shape[1]) == int((np.ptp(rewards, axis=1) == 0).sum())


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 64), st.sampled_from(["Group", "None"]))
def test_equal_rewards_give_exactly_zero_for_any_value(reward: float, group_size: int, scale: ScaleAdvantages) -> None:
    rewards = np.full(group_size, reward, np.float32)
    assert not group_advantages(rewards, group_size, scale=scale).any()
    assert uniform_groups(rewards, group_size) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_reward_that_is_not_finite_is_refused_with_its_position(bad: float) -> None:
    with pytest.raises(BadInput, match="completion 2"):
        group_advantages(np.array([0, 1, bad, 1], np.float32), 2, scale="Group")


def test_rewards_of_incomplete_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 3"):
        group_advantages(np.zeros(4, np.float32), 3, scale="Group")
