"""The first and the last reward of a run, and its trend. All places that show them take them from here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Literal

from rljob_client.run_directory.records import RewardStatistics

_LARGEST_WINDOW_STEPS = 5
_CLEAR_STANDARD_ERRORS = 2.0
"""Number of standard errors by which fewer than 1 in 20 runs without a trend differ."""

Verdict = Literal["rose", "fell", "stayed"]


@dataclass(frozen=True, slots=True)
class RewardTrend:
    """Mean rewards of the first and of the last steps of a run, which do not overlap."""

    last: float
    window_steps: int
    """Number of steps that `first` and `last` are means of."""

    first: float | None = None
    """None if there is only one step."""

    verdict: Verdict | None = None
    """`stayed`: the difference is within the noise, two standard errors. None if there is only one step."""


def reward_trend(rewards: Sequence[RewardStatistics]) -> RewardTrend | None:
    """The trend of the mean rewards, by step. Leaves out those that are not finite; None if there is no other."""
    finite = [reward for reward in rewards if math.isfinite(reward.mean)]
    if not finite:
        return None
    if len(finite) == 1:
        return RewardTrend(finite[0].mean, 1)
    window = window_steps(len(finite))
    (first, first_variance), (last, last_variance) = map(_mean_and_variance, (finite[:window], finite[-window:]))
    noise = max(_CLEAR_STANDARD_ERRORS * math.sqrt(first_variance + last_variance), 1e-6 * max(abs(first), abs(last)))
    verdict: Verdict = "stayed"
    if abs(last - first) > noise:
        verdict = "rose" if last > first else "fell"
    return RewardTrend(last, window, first, verdict)


def window_steps(steps: int) -> int:
    """Five steps, or half of all steps if there are fewer than ten; at least one."""
    return max(1, min(_LARGEST_WINDOW_STEPS, steps // 2))


def reward_text(reward: float) -> str:
    """A reward with three decimals, or with two digits if it is very small."""
    return f"{reward:.3f}" if not reward or abs(reward) >= 0.01 else f"{reward:.2g}"


def _mean_and_variance(window: Sequence[RewardStatistics]) -> tuple[float, float]:
    """The mean over the steps, and the variance (squared standard error) of that mean."""
    means = [reward.mean for reward in window]
    if len(means) > 1:
        return fmean(means), variance(means) / len(means)
    # The number of responses is not recorded: a step of at least four is assumed.
    spread = window[0].std if math.isfinite(window[0].std) else math.inf
    return means[0], spread**2 / 4
