"""Plot of the reward over the steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from rljob_trainer.ledger.records import StepRecord
from rljob_trainer.ledger.summary import REWARD_WINDOW_STEPS
from rljob_trainer.plot.style import label_right, step_axis, titled_figure

_COLOUR = "#0072b2"
_LONGEST_WINDOW_STEPS = 51

Values = npt.NDArray[np.float64]


def draw_reward(steps: Sequence[StepRecord]) -> Figure:
    """Mean reward of each step as dots, running mean as a line, and mean ± std within min and max as a band."""
    numbers = np.array([step.step for step in steps])
    mean, std, low, high = _columns(steps)
    window = running_window(len(steps))
    smooth = running_mean(mean, window)

    figure, (axes,) = titled_figure(
        _title(mean),
        f"Dots: mean of a step. Line: mean of the last {window} steps. "
        "Band: ± one standard deviation of the rewards of a step.",
    )
    band_low, band_high = (running_mean(edge, window) for edge in band(mean, std, low, high))
    axes.fill_between(numbers, band_low, band_high, color=_COLOUR, alpha=0.12, linewidth=0)
    axes.plot(numbers, mean, "o", color=_COLOUR, alpha=0.45, markersize=dot_size(len(steps)), markeredgewidth=0)
    axes.plot(numbers, smooth, color=_COLOUR, linewidth=2.4)
    step_axis(axes, numbers[0], numbers[-1])
    axes.set_ylabel("reward")
    label_right(axes, [(f"{smooth[-1]:.2f}", smooth[-1], _COLOUR)])
    return figure


def running_window(steps: int) -> int:
    """About a tenth of the run, but 5 to 51 steps."""
    return max(REWARD_WINDOW_STEPS, min(_LONGEST_WINDOW_STEPS, steps // 10))


def running_mean(values: Values, window: int) -> Values:
    """For each value, the mean of the last `window` values; of fewer at the start. [steps] → [steps]."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    means: Values = (sums[ends] - sums[starts]) / (ends - starts)
    return means


def band(mean: Values, std: Values, low: Values, high: Values) -> tuple[Values, Values]:
    """Mean ± std, limited to the lowest and highest reward."""
    return np.maximum(mean - std, low), np.minimum(mean + std, high)


def dot_size(steps: int) -> float:
    """In points: large for ten steps, small for thousands."""
    return float(np.clip(28 / np.sqrt(steps), 1.5, 5.5))


def _columns(steps: Sequence[StepRecord]) -> tuple[Values, Values, Values, Values]:
    rewards = [step.reward for step in steps]
    rows = np.array([(r.mean, r.std, r.min, r.max) for r in rewards], np.float64)
    return rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3]


def _title(mean: Values) -> str:
    if len(mean) == 1:
        return f"Reward was {mean[0]:.2f} in the first step"
    first, last = mean[:REWARD_WINDOW_STEPS].mean(), mean[-REWARD_WINDOW_STEPS:].mean()
    if len(mean) < 2 * REWARD_WINDOW_STEPS:
        first, last = mean[0], mean[-1]
    change = "rose" if last - first > 0.005 else "fell" if first - last > 0.005 else "stayed"
    if change == "stayed":
        return f"Reward stayed at {last:.2f} over {len(mean)} steps"
    return f"Reward {change} from {first:.2f} to {last:.2f} in {len(mean)} steps"
