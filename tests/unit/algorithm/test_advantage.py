"""Advantages of a step: by hand, against loops over responses, with responses that take no part."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.algorithm import AlgorithmSpec
from rljob_api.algorithms import ALGORITHMS, AlgorithmName
from rljob_client.errors import BadInput
from rljob_trainer.algorithms import advantages
from rljob_trainer.algorithms.advantages import groups_without_gradient, scored
from rljob_trainer.rollout_batch import RolloutBatch


def batch_of(lengths: Sequence[int], group_size: int, kept: Sequence[bool] = ()) -> RolloutBatch:
    return RolloutBatch(
        step=1,
        group_size=group_size,
        prompt_ids=[np.ones(2, np.int32)] * (len(lengths) // group_size),
        response_ids=[np.ones(length, np.int32) for length in lengths],
        rollout_logprobs=[np.zeros(length, np.float32) for length in lengths],
        finished=np.ones(len(lengths), np.bool_),
        kept=np.asarray(kept, np.bool_),
    )


def advantages_of(
    name: AlgorithmName, rewards: Sequence[float], batch: RolloutBatch, **settings: str
) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    algorithm = AlgorithmSpec(steps=1, name=name, **settings)  # type: ignore[arg-type]
    function = getattr(advantages, ALGORITHMS[name].advantage)
    return scored(batch, np.asarray(rewards, np.float32), function, algorithm.settings).advantages


@pytest.mark.parametrize(
    ("name", "lengths", "rewards", "expected"),
    [
        ("grpo", [5] * 3, [1, 0, 0], [2 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3)]),
        ("gspo", [5] * 3, [3, 1, 2], [1, -1, 0]),
        ("dr_grpo", [5] * 3, [1, 0, 0], [2 / 3, -1 / 3, -1 / 3]),
        ("rloo", [5] * 3, [1, 0, 0], [1, -1 / 2, -1 / 2]),
        ("rloo", [5] * 4, [4, 1, 2, 1], [4 - 4 / 3, 1 - 7 / 3, 2 - 2, 1 - 7 / 3]),
        ("opo", [5] * 3, [4, 1, 1], [2, -1, -1]),
        ("opo", [1, 3], [1, 0], [0.75, -0.25]),  # the mean of four tokens is 1/4
        ("opo", [0, 0], [1, 0], [0.5, -0.5]),  # no tokens to weigh
        ("reinforce_plus_plus", [5] * 4, [1, 0, 1, 1], [1 / math.sqrt(3), -math.sqrt(3), *[1 / math.sqrt(3)] * 2]),
        ("reinforce_plus_plus", [1, 3], [1, 0], [0.75 / math.sqrt(3 / 16), -0.25 / math.sqrt(3 / 16)]),  # by tokens
    ],
)
def test_a_group_gets_the_advantages_of_the_paper(
    name: AlgorithmName, lengths: list[int], rewards: list[float], expected: list[float]
) -> None:
    found = advantages_of(name, rewards, batch_of(lengths, len(rewards)))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def straightforward(
    name: AlgorithmName, rewards: list[float], lengths: list[int], kept: list[bool], size: int
) -> list[float]:
    """The same by loops over Python floats."""
    groups = [range(start, start + size) for start in range(0, len(rewards), size)]
    found = [0.0] * len(rewards)
    for group in groups:
        taking = [i for i in group if kept[i]]
        for i in taking:
            others = [rewards[j] for j in taking if j != i]
            mean = statistics.fmean(rewards[j] for j in taking)
            deviation = statistics.stdev(rewards[j] for j in taking) if others else 0.0
            if name == "rloo":
                found[i] = rewards[i] - statistics.fmean(others) if others else 0.0
            elif name == "opo":
                tokens = [rewards[j] for j in taking for _ in range(lengths[j])]
                found[i] = rewards[i] - (statistics.fmean(tokens) if tokens else mean)
            elif name == "reinforce_plus_plus":
                found[i] = rewards[i]
            elif name in ("dr_grpo", "reinforce_plus_plus_baseline"):
                found[i] = rewards[i] - mean
            else:
                found[i] = (rewards[i] - mean) / deviation if deviation else 0.0
    if name.startswith("reinforce"):
        tokens = [found[i] for i in range(len(rewards)) if kept[i] for _ in range(lengths[i])]
        mean, deviation = (statistics.fmean(tokens), statistics.pstdev(tokens)) if tokens else (0.0, 0.0)
        found = [
            (value - mean) / deviation if kept[i] and lengths[i] and deviation else 0.0 for i, value in enumerate(found)
        ]
    return found


@pytest.mark.parametrize("name", ALGORITHMS)
@given(data=st.data())
def test_advantages_are_those_of_a_straightforward_implementation(name: AlgorithmName, data: st.DataObject) -> None:
    size, prompts = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 4))
    count = size * prompts
    rewards = data.draw(st.lists(st.integers(-20, 20).map(float), min_size=count, max_size=count))
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=count, max_size=count))
    kept = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    batch = batch_of(lengths, size, kept)
    expected = straightforward(name, rewards, lengths, kept, size)
    np.testing.assert_allclose(advantages_of(name, rewards, batch), expected, rtol=1e-4, atol=1e-4)
    every = straightforward(name, rewards, lengths, [True] * count, size)
    whole = advantages_of(name, rewards, replace(batch, kept=np.zeros(0, np.bool_)))
    np.testing.assert_allclose(whole, every, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ALGORITHMS)
@given(reward=st.floats(-1e6, 1e6, width=32), lengths=st.lists(st.integers(1, 9), min_size=2, max_size=16))
def test_equal_rewards_give_exactly_zero_for_any_value(name: AlgorithmName, reward: float, lengths: list[int]) -> None:
    batch = batch_of(lengths, len(lengths))
    found = replace(batch, advantages=advantages_of(name, [reward] * len(lengths), batch))
    assert not found.advantages.any()
    assert groups_without_gradient(found) == 1


def test_a_response_that_takes_no_part_moves_no_other() -> None:
    """Not even with a reward that is no number."""
    batch = batch_of([2, 2, 2], 3, kept=[True, True, False])
    np.testing.assert_allclose(advantages_of("dr_grpo", [1, 0, np.nan], batch), [0.5, -0.5, 0])
    alone = batch_of([2, 2, 2], 3, kept=[True, False, False])
    for name in ALGORITHMS:
        assert not advantages_of(name, [1, 0, 5], alone).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_reward_that_is_not_finite_is_refused_with_its_position(bad: float) -> None:
    with pytest.raises(BadInput, match="completion 2"):
        advantages_of("grpo", [0, 1, bad, 1], batch_of([1] * 4, 2))


def test_rewards_of_incomplete_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 3"):
        advantages_of("grpo", [0.0] * 4, batch_of([1] * 4, 3))
