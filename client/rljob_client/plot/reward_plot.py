"""Plot of the reward over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from rljob_client.plot.style import Values, dot_size, label_right, step_axis, titled_figure
from rljob_client.run_directory.records import StepRecord
from rljob_client.run_directory.reward_trend import RewardTrend, reward_text, reward_trend, window_steps

_COLOR = "#0072b2"
_LONGEST_WINDOW_STEPS = 51


def draw_reward(steps: Sequence[StepRecord]) -> Figure | None:
    """Mean reward of each step as dots, running mean as a line, and mean ± std of the same steps as a band.

    None if no step has a finite reward.
    """
    rewards = [step.reward for step in steps]
    trend = reward_trend(rewards)
    if trend is None:
        return None
    finite = [step for step in steps if math.isfinite(step.reward.mean)]
    numbers = np.array([step.step for step in finite])
    mean, std, low, high = _columns(finite)
    window = running_window(len(finite))
    smooth = running_mean(mean, window)

    line = f"Line: mean of the last {window} steps. " if window > 1 else ""
    figure, (axes,) = titled_figure(
        reward_title(trend, len(steps)),
        f"Dots: steps. {line}Band: ± mean standard deviation of a step, cut at min and max.",
    )
    edges = band(smooth, running_mean(std, window), low.min(), high.max())
    if len(finite) == 1:  # an area needs two steps
        axes.vlines(numbers, *edges, color=_COLOR, alpha=0.12, linewidth=12)
    axes.fill_between(numbers, *edges, color=_COLOR, alpha=0.12, linewidth=0)
    axes.plot(numbers, mean, "o", color=_COLOR, alpha=0.45, markersize=dot_size(len(finite)), markeredgewidth=0)
    axes.plot(numbers, smooth, color=_COLOR, linewidth=2.4)
    step_axis(axes, steps[0].step, steps[-1].step)
    axes.set_ylabel("reward")
    label_right(axes, [(reward_text(trend.last), trend.last, _COLOR)])
    return figure


def running_window(steps: int) -> int:
    """The window of the trend; in long runs a twentieth of the run, but at most 51 steps."""
    return max(window_steps(steps), min(_LONGEST_WINDOW_STEPS, steps // 20))


def running_mean(values: Values, window: int) -> Values:
    """For each value, the mean of the last `window` values; of fewer at the start. [steps] → [steps]."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    means: Values = (sums[ends] - sums[starts]) / (ends - starts)
    return means


def band(mean: Values, std: Values, low: float, high: float) -> tuple[Values, Values]:
    """Mean ± std, limited to the lowest and highest reward. [steps], [steps] → lower and upper bound, [steps] each."""
    return np.maximum(mean - std, low), np.minimum(mean + std, high)


def reward_title(trend: RewardTrend, steps: int) -> str:
    """`Reward rose from 0.060 to 0.996 in 60 steps`."""
    last = reward_text(trend.last)
    if trend.first is None:
        return f"Reward was {last} in the only step"
    first = reward_text(trend.first)
    if trend.verdict == "stayed":
        between = f"at {last}" if first == last else f"within the noise, from {first} to {last},"
        return f"Reward stayed {between} in {steps} steps"
    return f"Reward {trend.verdict} from {first} to {last} in {steps} steps"


def _columns(steps: Sequence[StepRecord]) -> tuple[Values, Values, Values, Values]:
    rewards = [step.reward for step in steps]
    rows = np.array([(r.mean, r.std, r.min, r.max) for r in rewards], np.float64)
    return rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3]
