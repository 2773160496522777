"""Learning curves: the metrics of the ledger over the steps, in small panels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rljob_trainer.ledger.records import StepRecord
from rljob_trainer.plot.style import (
    FAILURE_COLOUR,
    INK,
    MUTED,
    Values,
    dot_size,
    grid_figure,
    merge_lines,
    step_axis,
)

_LINE_COLOURS = ("#0072b2", "#d55e00", "#009e73")
_SMALLEST_RANGE = 0.02
"""Of an axis, relative to its values."""
_SMALL_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    unit: str

    lines: Mapping[str, str | Callable[[StepRecord], float]]
    """Metric of the step, or its value, by label. Metrics that a run does not have are left out."""

    is_share: bool = False


_PANELS = (
    _Panel("loss", "loss", {"loss": "loss"}),
    _Panel("KL divergence", "nats", {"within the step": "ppo_kl", "from the initial model": "kl"}),
    _Panel("entropy", "nats per token", {"entropy": "entropy"}),
    _Panel("gradient norm", "norm before clipping", {"grad_norm": "grad_norm"}),
    _Panel(
        "response length",
        "tokens",
        {"mean": lambda step: step.response.mean_tokens, "longest": lambda step: step.response.max_tokens},
    ),
    _Panel("responses cut at the limit", "share", {"cut": lambda step: step.response.clipped_ratio}, is_share=True),
    _Panel("groups with equal rewards", "share", {"uniform": "uniform_groups"}, is_share=True),
    _Panel("importance weights", "weight", {"mean": "importance_weight_mean", "largest": "importance_weight_max"}),
    _Panel(
        "clipped tokens",
        "share",
        {"low": "clip_fraction_low", "high": "clip_fraction_high", "dual": "clip_fraction_dual"},
        is_share=True,
    ),
)


def draw_learning(steps: Sequence[StepRecord]) -> Figure:
    """One panel per quantity, each with an axis of its own. Values that are not finite are gaps, marked below."""
    panels = [(panel, lines) for panel in _PANELS if (lines := _lines(panel, steps))]
    not_finite = np.logical_or.reduce([np.isinf(values) for _, lines in panels for values in lines.values()])
    figure, all_axes = grid_figure(
        _title(steps, int(not_finite.sum())),
        "One value per step; each panel has an axis of its own."
        + (" Crosses: NaN or infinity." if not_finite.any() else ""),
        len(panels),
    )
    for axes, (panel, lines) in zip(all_axes, panels, strict=True):
        _draw_panel(axes, panel, lines, np.array([step.step for step in steps]))
    return figure


def _title(steps: Sequence[StepRecord], not_finite: int) -> str:
    uniform = sum(step.has_no_signal for step in steps)
    found = {"no learning signal": uniform, "NaN or infinity": not_finite}
    parts = [f"{what} in {count}" for what, count in found.items() if count]
    title = f"Learning curves of {len(steps)} steps" if len(steps) > 1 else "Learning curves of one step"
    return title + (f": {', '.join(parts)}" if parts else "")


def _lines(panel: _Panel, steps: Sequence[StepRecord]) -> dict[str, Values]:
    """The values of each line, [steps]: NaN if the step has none, infinite if it is not a finite number."""
    lines = {}
    for label, of in panel.lines.items():
        found = [step.metrics.get(of) if isinstance(of, str) else of(step) for step in steps]
        if any(value is not None for value in found):
            finite = [np.nan if value is None else value if np.isfinite(value) else np.inf for value in found]
            lines[label] = np.array(finite, np.float64)
    return lines


def _draw_panel(axes: Axes, panel: _Panel, lines: Mapping[str, Values], numbers: Values) -> None:
    finite = {label: np.where(np.isinf(values), np.nan, values) for label, values in lines.items()}
    low, high = _range(finite, panel.is_share)
    dot = dot_size(len(numbers)) / 1.5
    merged = merge_lines(finite, 0.005 * (high - low))
    for (labels, values), colour in zip(merged, _LINE_COLOURS, strict=False):
        axes.plot(numbers, values, "-o", color=colour, linewidth=1.2, markersize=dot, label=", ".join(labels))
    bad = np.logical_or.reduce([np.isinf(values) for values in lines.values()])
    axes.plot(numbers[bad], np.full(bad.sum(), 0.04), "x", color=FAILURE_COLOUR, transform=axes.get_xaxis_transform())
    step_axis(axes, int(numbers[0]), int(numbers[-1]), most_ticks=4)
    axes.set_title(panel.title, loc="left", fontsize=11, color=INK)
    axes.set_ylabel(panel.unit)
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter("{x:.6g}")
    room = 0.05 * (high - low)
    in_legend = len(merged) if len(lines) > 1 else 0
    axes.set_ylim(low - room, high + room + 0.18 * (high - low) * in_legend)
    if in_legend:
        axes.legend(loc="upper left", fontsize=9, frameon=False, labelcolor=MUTED, handlelength=1.2, borderaxespad=0.1)


def _range(lines: Mapping[str, Values], is_share: bool) -> tuple[float, float]:
    """The lowest and the highest value of the axis. Rounding errors must not fill it."""
    every = np.concatenate(list(lines.values()))
    low, high = (float(np.nanmin(every)), float(np.nanmax(every))) if np.isfinite(every).any() else (0.0, 1.0)
    if is_share:
        return 0.0, 1.0 if high > _SMALL_SHARE else _SMALL_SHARE
    room = (_SMALLEST_RANGE * max(abs(low), abs(high)) or 1.0) / 2
    return min(low, (low + high) / 2 - room), max(high, (low + high) / 2 + room)
