from __future__ import annotations

import math

import pytest

from rljob_client.run_directory.records import RewardStatistics
from rljob_client.run_directory.reward_trend import RewardTrend, reward_text, reward_trend

NAN, INFINITY = math.nan, math.inf
LINEAR = [step / 10 for step in range(20)]


def trend(means: list[float], std: float = 0.1) -> RewardTrend | None:
    return reward_trend([RewardStatistics(mean=mean, std=std, min=0.0, max=1.0) for mean in means])


@pytest.mark.parametrize(
    ("means", "expected"),
    [
        (LINEAR[:1], (None, 0.0, 1)),
        (LINEAR[:2], (0.0, 0.1, 1)),
        (LINEAR[:3], (0.0, 0.2, 1)),
        (LINEAR[:4], (0.05, 0.25, 2)),
        (LINEAR[:9], (0.15, 0.65, 4)),
        (LINEAR[:10], (0.2, 0.7, 5)),
        (LINEAR, (0.2, 1.7, 5)),
        ([NAN, 0.1, INFINITY, 0.3], (0.1, 0.3, 1)),
    ],
)
def test_windows_do_not_overlap(means: list[float], expected: tuple[float | None, float, int]) -> None:
    found = trend(means)
    assert found is not None
    assert (found.first, found.last, found.window_steps) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("means", "std", "verdict"),
    [
        (LINEAR[:1], 0.1, None),
        (LINEAR, 0.1, "rose"),
        (LINEAR[::-1], 0.1, "fell"),
        ([0.1] * 7, 0.0, "stayed"),
        ([0.1] * 3, 0.0, "stayed"),
        ([0.0, 0.0], 0.0, "stayed"),
        ([0.25] * 5 + [0.5] * 5, 0.0, "rose"),
        ([0.171, 0.288, 0.240, 0.248], 0.1, "stayed"),
        ([0.09, 0.10, 0.07, 0.09, 0.10, 0.08, 0.10, 0.06, 0.08, 0.08], 0.1, "stayed"),
        ([0.03, 0.13, 0.00], 0.1, "stayed"),
        ([0.1, 0.9], 0.1, "rose"),
        ([0.1, 0.9], NAN, "stayed"),
        ([0.1, NAN, 0.9], 0.1, "rose"),
    ],
)
def test_a_difference_within_the_noise_is_no_trend(means: list[float], std: float, verdict: str | None) -> None:
    found = trend(means, std)
    assert found is not None
    assert found.verdict == verdict


def test_without_a_finite_reward_there_is_no_trend() -> None:
    assert trend([]) is trend([NAN, INFINITY]) is None


@pytest.mark.parametrize(("reward", "text"), [(0.0, "0.000"), (0.0604, "0.060"), (-2.5, "-2.500"), (3e-4, "0.0003")])
def test_a_small_reward_is_not_shown_as_zero(reward: float, text: str) -> None:
    assert reward_text(reward) == text
