"""Learning curves: the metrics of the ledger over the steps, in small panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rljob_client.plot.style import FAILURE_COLOR, INK, MUTED, Values, dot_size, grid_figure, merge_lines, step_axis
from rljob_client.run_directory.records import StepRecord

_LINE_COLORS = ("#0072b2", "#d55e00", "#009e73")
_SMALLEST_RANGE = 0.02
"""Smallest range of an axis, as a share of its values: rounding errors must not fill it."""
_SMALL_SHARE = 0.2
_SHARE = "share"

_PANELS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("loss", "loss", {"loss": "loss"}),
    ("KL divergence", "nats", {"ppo_kl": "within the step", "kl": "from the initial model"}),
    ("entropy", "nats per token", {"entropy": "entropy"}),
    ("gradient norm", "norm before clipping", {"grad_norm": "norm"}),
    ("response length", "tokens", {"mean_tokens": "mean", "max_tokens": "longest"}),
    ("clipped responses", _SHARE, {"clipped_ratio": "cut"}),
    ("uniform groups", _SHARE, {"uniform_groups": "uniform"}),
    ("importance weights", "weight", {"importance_weight_mean": "mean", "importance_weight_max": "largest"}),
    (
        "clip fraction",
        _SHARE,
        {"clip_fraction_low": "low", "clip_fraction_high": "high", "clip_fraction_dual": "dual"},
    ),
)
"""Title, unit, and lines: the label of each value of a step. Values that a run does not have are left out."""


def draw_learning(steps: Sequence[StepRecord]) -> Figure:
    """One panel per quantity, each with an axis of its own. Values that are not finite are gaps, marked below."""
    of_steps = [{**step.metrics, **step.response.model_dump()} for step in steps]
    panels = [(title, unit, lines) for title, unit, of in _PANELS if (lines := _lines(of, of_steps))]
    not_finite = np.logical_or.reduce([np.isinf(values) for *_, lines in panels for values in lines.values()])
    figure, all_axes = grid_figure(
        _title(steps, int(not_finite.sum())),
        "One value per step; each panel has an axis of its own. Crosses: NaN or infinity.",
        len(panels),
    )
    for axes, (title, unit, lines) in zip(all_axes, panels, strict=True):
        axes.set_title(title, loc="left", fontsize=11, color=INK)
        axes.set_ylabel(unit)
        step_axis(axes, steps[0].step, steps[-1].step, most_ticks=4)
        _draw_lines(axes, lines, np.array([step.step for step in steps]), is_share=unit == _SHARE)
    return figure


def _title(steps: Sequence[StepRecord], not_finite: int) -> str:
    uniform = sum(step.has_no_signal for step in steps)
    found = {"no learning signal": uniform, "NaN or infinity": not_finite}
    parts = [f"{what} in {count}" for what, count in found.items() if count]
    title = f"Learning curves of {len(steps)} steps" if len(steps) > 1 else "Learning curves of one step"
    return title + (f": {', '.join(parts)}" if parts else "")


def _lines(labels: Mapping[str, str], of_steps: Sequence[Mapping[str, float]]) -> dict[str, Values]:
    """The values of each line, [steps]: NaN if the step has none, infinite if it is not a finite number."""
    lines = {}
    for name, label in labels.items():
        values = np.array([step.get(name, np.nan) for step in of_steps], np.float64)
        present = np.array([name in step for step in of_steps])
        if present.any():
            lines[label] = np.where(present & ~np.isfinite(values), np.inf, values)
    return lines


def _draw_lines(axes: Axes, lines: Mapping[str, Values], numbers: Values, *, is_share: bool) -> None:
    bad = np.logical_or.reduce([np.isinf(values) for values in lines.values()])
    axes.plot(numbers[bad], np.full(bad.sum(), 0.04), "x", color=FAILURE_COLOR, transform=axes.get_xaxis_transform())
    finite = {label: np.where(np.isinf(values), np.nan, values) for label, values in lines.items()}
    low, high = _range(np.concatenate(list(finite.values())), is_share)
    merged = merge_lines(finite, 0.005 * (high - low))
    dot = dot_size(len(numbers)) / 1.5
    for (labels, values), color in zip(merged, _LINE_COLORS, strict=False):
        axes.plot(numbers, values, "-o", color=color, linewidth=1.2, markersize=dot, label=", ".join(labels))
    if len(lines) > 1:
        axes.legend(loc="upper left", fontsize=9, frameon=False, labelcolor=MUTED, handlelength=1.2, borderaxespad=0.1)
    above = 0.05 + (0.18 * len(merged) if len(lines) > 1 else 0)
    axes.set_ylim(low - 0.05 * (high - low), high + above * (high - low))
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter("{x:.6g}")


def _range(values: Values, is_share: bool) -> tuple[float, float]:
    """The lowest and the highest value of the axis."""
    finite = values[~np.isnan(values)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    if is_share:
        return 0.0, 1.0 if high > _SMALL_SHARE else _SMALL_SHARE
    room = (_SMALLEST_RANGE * max(abs(low), abs(high)) or 1.0) / 2
    return min(low, (low + high) / 2 - room), max(high, (low + high) / 2 + room)
