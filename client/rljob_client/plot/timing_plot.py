"""Plot of the seconds by phase over the steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from rljob_client.plot.style import MUTED, label_right, phase_color, step_axis, titled_figure
from rljob_client.run_directory.records import PHASES, StepRecord

_BETWEEN = "between phases"
_NEGLIGIBLE_SHARE = 0.002
_MOST_BARS = 150

Values = npt.NDArray[np.float64]


def draw_timing(steps: Sequence[StepRecord]) -> Figure:
    """The phases of each step, stacked up to its wall time, with the share of each phase as a label."""
    seconds = seconds_by_phase(steps)
    means = {phase: float(values.mean()) for phase, values in seconds.items()}
    step_seconds = sum(means.values())
    longest = max(means, key=means.__getitem__)
    edges = bar_edges(len(steps))
    width = edges[1] - edges[0]

    figure, (axes,) = titled_figure(
        f"A step took {step_seconds:.2f} s; {longest} was {means[longest] / step_seconds:.0%} of it",
        ("Seconds of each step by phase, stacked." if width == 1 else f"Mean seconds of {width} steps each, by phase.")
        + (f" Shares are of all {len(steps)} steps." if len(steps) > 1 else ""),
    )
    top = np.zeros(len(edges) - 1)
    for phase, values in seconds.items():
        base, top = top, top + np.add.reduceat(values, edges[:-1]) / np.diff(edges)
        axes.stairs(top, steps[0].step - 0.5 + edges, baseline=base, fill=True, color=phase_color(phase))
    step_axis(axes, steps[0].step, steps[-1].step)
    height = axis_height(top)
    axes.set_ylim(0, height)
    for bar in cut_bars(top, height):
        middle = steps[0].step - 0.5 + (edges[bar] + edges[bar + 1]) / 2
        axes.text(middle, height, f"↑ {top[bar]:.3g} s", ha="center", va="bottom", color=MUTED, fontsize=10)
    axes.set_ylabel("seconds")
    label_right(axes, _labels(means, step_seconds))
    return figure


def seconds_by_phase(steps: Sequence[StepRecord]) -> dict[str, Values]:
    """Seconds by step, [steps], for each phase with a noticeable share. They add up to the wall time."""
    columns = {phase: np.array([step.seconds.get(phase, 0.0) for step in steps]) for phase in PHASES}
    in_phases = np.sum(list(columns.values()), axis=0)
    columns[_BETWEEN] = np.maximum(0.0, np.array([step.total_seconds for step in steps]) - in_phases)
    whole = sum(values.sum() for values in columns.values())
    return {phase: values for phase, values in columns.items() if values.sum() >= _NEGLIGIBLE_SHARE * whole}


def bar_edges(steps: int) -> npt.NDArray[np.intp]:
    """Start of each bar, and end of the last: [bars + 1]. A bar is one step, or the mean of several if there are
    many."""
    width = -(-steps // _MOST_BARS)
    return np.append(np.arange(0, steps, width), steps)


def axis_height(tops: Values) -> float:
    """Height of the highest bar, unless a few outliers, such as a first compilation, would flatten all others.

    `tops`: [bars], seconds.
    """
    highest, usual = float(tops.max()), float(np.quantile(tops, 0.95))
    return 1.05 * (highest if highest < 4 * usual else 2 * usual) or 1.0


_MOST_CUT_MARKED = 3


def cut_bars(tops: Values, height: float) -> list[int]:
    """The highest bars that do not fit into the axis, few enough to mark each. `tops`: [bars], seconds."""
    highest = np.argsort(-tops, kind="stable")[:_MOST_CUT_MARKED]
    return [int(bar) for bar in highest if tops[bar] > height]


def _labels(means: dict[str, float], step_seconds: float) -> list[tuple[str, float, str]]:
    """Labels next to the bar of the mean step, each at the middle of its phase."""
    labels, base = [], 0.0
    for phase, seconds in means.items():
        labels.append((f"{phase}  {seconds / step_seconds:.0%}", base + seconds / 2, phase_color(phase)))
        base += seconds
    return labels
