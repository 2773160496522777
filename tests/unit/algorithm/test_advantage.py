from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rljob_client.errors import BadInput
from rljob_trainer.algorithm.advantage import group_advantages, uniform_groups

GROUP = 4
spread_rewards = arrays(np.float32, (3, GROUP), elements=st.integers(-50, 50).map(float)).filter(
    lambda rewards: bool((rewards.std(axis=1) > 0).all())
)


def test_advantages_are_standard_scores_within_the_group() -> None:
    rewards = np.array([1, 2, 3, 0, 0, 6], np.float32)
    # Group 1: mean 2, unbiased std 1. Group 2: mean 2, unbiased std sqrt((4 + 4 + 16) / 2) = sqrt(12).
    expected = [-1, 0, 1, -2 / 12**0.5, -2 / 12**0.5, 4 / 12**0.5]
    np.testing.assert_allclose(group_advantages(rewards, 3, scale=True), expected, rtol=1e-5)
    np.testing.assert_allclose(group_advantages(rewards, 3, scale=False), [-1, 0, 1, -2, -2, 4])


def test_a_group_of_equal_rewards_teaches_nothing_and_is_counted() -> None:
    rewards = np.array([0.1, 0.1, 0.1, 0, 1, 0, 0.3, 0.3, 0.3], np.float32)
    advantages = group_advantages(rewards, 3, scale=True)
    assert advantages[:3].tolist() == advantages[6:].tolist() == [0, 0, 0]
    assert np.abs(advantages[3:6]).min() > 0.5
    assert uniform_groups(rewards, 3) == 2


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 64), st.booleans())
def test_equal_rewards_give_exactly_zero_for_any_value(reward: float, group_size: int, scale: bool) -> None:
    assert not group_advantages(np.full(group_size, reward, np.float32), group_size, scale=scale).any()


def test_the_only_completion_of_a_group_has_advantage_zero() -> None:
    assert group_advantages(np.array([3.0, 5.0], np.float32), 1, scale=True).tolist() == [0, 0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_reward_that_is_not_finite_is_refused_with_its_position(bad: float) -> None:
    with pytest.raises(BadInput, match="completion 2"):
        group_advantages(np.array([0, 1, bad, 1], np.float32), 2, scale=True)


def test_rewards_of_incomplete_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 3"):
        group_advantages(np.zeros(4, np.float32), 3, scale=True)


@given(spread_rewards, st.integers(-20, 20))
def test_shifting_all_rewards_changes_nothing(rewards: np.ndarray, shift: int) -> None:
    for scale in (True, False):
        shifted = group_advantages((rewards + shift).reshape(-1), GROUP, scale=scale)
        np.testing.assert_allclose(shifted, group_advantages(rewards.reshape(-1), GROUP, scale=scale), atol=1e-4)


@given(spread_rewards, st.integers(1, 20))
def test_scaling_all_rewards_scales_only_unscaled_advantages(rewards: np.ndarray, factor: int) -> None:
    flat = rewards.reshape(-1)
    scaled = group_advantages(flat * factor, GROUP, scale=True)
    np.testing.assert_allclose(scaled, group_advantages(flat, GROUP, scale=True), atol=1e-4)
    unscaled = group_advantages(flat * factor, GROUP, scale=False)
    np.testing.assert_allclose(unscaled, factor * group_advantages(flat, GROUP, scale=False), atol=1e-3)


@given(spread_rewards, st.permutations(range(GROUP)))
def test_the_order_within_a_group_does_not_matter(rewards: np.ndarray, order: list[int]) -> None:
    advantages = group_advantages(rewards.reshape(-1), GROUP, scale=True).reshape(-1, GROUP)
    permuted = group_advantages(rewards[:, order].reshape(-1), GROUP, scale=True).reshape(-1, GROUP)
    np.testing.assert_allclose(permuted, advantages[:, order], atol=1e-6)


@given(spread_rewards)
def test_advantages_of_a_group_sum_to_zero(rewards: np.ndarray) -> None:
    advantages = group_advantages(rewards.reshape(-1), GROUP, scale=True).reshape(-1, GROUP)
    np.testing.assert_allclose(advantages.sum(axis=1), 0, atol=1e-5)
