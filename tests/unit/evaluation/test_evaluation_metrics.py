"""Metrics of an evaluation, against all subsets of its responses."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.rollout_batch import Completion
from rljob_trainer.runtime.evaluation import evaluation_metrics, pass_at


def response(tokens: int, *, finished: bool = True) -> Completion:
    return Completion(list(range(tokens)), [-1.0] * tokens, finished, "")


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(successes: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(successes)))
    expected = fmean(any(subset) for subset in combinations(successes, k))
    assert pass_at(k, sum(successes), len(successes)) == pytest.approx(expected)


def test_metrics_of_several_responses_to_each_prompt() -> None:
    rewards = [1.0, 0.0, 0.5, 0.0, 0.0, 0.0]  # two prompts, three responses each
    responses = [response(2), response(4, finished=False), *[response(3)] * 4]
    metrics = evaluation_metrics(rewards, responses, 3, success_reward=0.5)
    assert metrics["reward_mean"] == 0.25
    assert (metrics["avg@3"], metrics["pass@1"]) == pytest.approx((1 / 3, 1 / 3))
    assert metrics["pass@2"] == pytest.approx((1 + 0) / 2), "of two of the three, one succeeds"
    assert metrics["pass@3"] == 0.5
    assert (metrics["response_mean_tokens"], metrics["response_max_tokens"]) == (3.0, 4)
    assert metrics["clipped_ratio"] == pytest.approx(1 / 6)


@pytest.mark.parametrize(("samples", "names"), [(1, {"1"}), (4, {"1", "2", "4"}), (6, {"1", "2", "4", "6"})])
def test_pass_at_k_is_given_for_powers_of_two_and_for_all(samples: int, names: set[str]) -> None:
    metrics = evaluation_metrics([1.0] * samples, [response(1)] * samples, samples, 1.0)
    assert {name.removeprefix("pass@") for name in metrics if name.startswith("pass@")} == names
    assert f"avg@{samples}" in metrics
