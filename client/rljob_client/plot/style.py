"""Common style of the plots: colors, fonts, frames, and labels next to the lines instead of legends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK = "#1f2933"
MUTED = "#66727f"
GRID = "#e4e7eb"
FAILURE_COLOR = "#b00020"

PHASE_COLORS = {
    "rollout": "#0072b2",
    "reward": "#cc79a7",
    "update": "#d55e00",
    "sync": "#009e73",
    "checkpoint": "#e0a100",
    "load": "#56b4e9",
}
"""Distinguishable with color blindness. Source: Okabe and Ito, Color Universal Design (2008); yellow darkened."""
OTHER_COLOR = "#8a949e"
GIB = 2**30

Values = npt.NDArray[np.float64]

STYLE: dict[str, Any] = {
    "figure.figsize": (9.0, 4.8),
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "figure.facecolor": "white",
    "font.family": "sans-serif",
    "font.sans-serif": ["Inter", "Helvetica Neue", "Arial", "Liberation Sans", "DejaVu Sans"],
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    # Far enough that the first label does not touch the lowest one of the other axis.
    "xtick.major.pad": 8,
    "lines.solid_capstyle": "round",
    # Text stays text in the SVG: searchable, and in the reader's own font.
    "svg.fonttype": "none",
    "svg.hashsalt": "rljob",
}


def phase_color(phase: str) -> str:
    return PHASE_COLORS.get(phase, OTHER_COLOR)


def titled_figure(title: str, subtitle: str, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with `panels` side by side that share the y axis, with a title and a subtitle."""
    return _figure(title, subtitle, 1, panels, sharey=True)


def stacked_figure(title: str, subtitle: str, rows: int) -> tuple[Figure, list[Axes]]:
    """A figure with `rows` of panels below each other, with a title and a subtitle."""
    return _figure(title, subtitle, rows, 1, relative_height=1 + 0.6 * (rows - 1))


def grid_figure(title: str, subtitle: str, panels: int) -> tuple[Figure, list[Axes]]:
    """A figure with `panels` small panels in rows of three, with a title and a subtitle."""
    rows = -(-panels // 3)
    figure, axes = _figure(title, subtitle, rows, 3, relative_height=0.2 + 0.48 * rows)
    for unused in axes[panels:]:
        unused.remove()
    return figure, axes[:panels]


def _figure(
    title: str, subtitle: str, rows: int, columns: int, *, relative_height: float = 1.0, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    """A figure with both texts above the panels, in a space of fixed height."""
    figure = Figure(layout="constrained")
    height = relative_height * figure.get_figheight()
    figure.set_figheight(height)
    figure.get_layout_engine().set(rect=(0.01, 0.01, 0.98, 1 - 0.86 / height), w_pad=0.1)  # type: ignore[union-attr, call-arg]
    figure.text(0.022, 1 - 0.216 / height, title, fontsize=15, fontweight="bold", va="top")
    figure.text(0.022, 1 - 0.552 / height, subtitle, fontsize=10.5, color=MUTED, va="top")
    return figure, list(figure.subplots(rows, columns, sharey=sharey, squeeze=False).flat)


def merge_lines(lines: Mapping[str, Values], tolerance: float) -> list[tuple[list[str], Values]]:
    """The lines, [steps] with NaN for a step without a value. Lines that look the same are drawn as one.

    They differ by at most `tolerance` at every step that both have, and in their latest values. Returns the names and
    the values of each line.
    """
    merged: list[tuple[list[str], Values]] = []
    for name, values in lines.items():
        for index, (names, drawn) in enumerate(merged):
            differences = np.append(np.abs(drawn - values), abs(_latest(drawn) - _latest(values)))
            if np.isfinite(differences[:-1]).any() and np.nanmax(differences) <= tolerance:
                merged[index] = ([*names, name], np.where(np.isnan(drawn), values, drawn))
                break
        else:
            merged.append(([name], values))
    return merged


def _latest(values: Values) -> float:
    present = values[~np.isnan(values)]
    return float(present[-1]) if len(present) else math.nan


def dot_size(steps: int) -> float:
    """Size of a dot in points: large for ten steps, small for thousands."""
    return float(np.clip(28 / np.sqrt(steps), 1.5, 5.5))


def step_axis(axes: Axes, first: int, last: int, most_ticks: int = 8) -> None:
    """An x axis of whole steps, from `first` to `last`."""
    axes.set_xlim(first - 0.5, last + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=most_ticks, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.set_xlabel("step")


def label_right(axes: Axes, labels: Sequence[tuple[str, float, str]]) -> None:
    """Write each `(text, y, color)` right of the axes at height `y`, moved apart if they would overlap."""
    lines = max((text.count("\n") + 1 for text, _, _ in labels), default=1)
    bottom, top = axes.get_ylim()
    height_points = axes.get_position().height * axes.figure.get_figheight() * 72  # type: ignore[union-attr]
    spacing = 14 * lines / height_points * (top - bottom)
    for (text, _, color), y in zip(labels, spread([y for _, y, _ in labels], spacing, bottom, top), strict=True):
        axes.annotate(
            text,
            xy=(1, y),
            xycoords=("axes fraction", "data"),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=color,
            fontsize=10.5,
            annotation_clip=False,
        )


def spread(heights: Sequence[float], spacing: float, bottom: float, top: float) -> list[float]:
    """`heights`, moved apart to a distance of at least `spacing`, within `bottom` and `top`.

    Keeps the order. If they do not all fit, they are spaced evenly over the whole range.
    """
    if not heights:
        return []
    order = sorted(range(len(heights)), key=heights.__getitem__)
    spacing = min(spacing, (top - bottom) / max(1, len(heights) - 1))
    placed = [0.0] * len(heights)
    limit = bottom
    for index in order:
        placed[index] = max(heights[index], limit)
        limit = placed[index] + spacing
    limit = top
    for index in reversed(order):
        placed[index] = min(placed[index], limit)
        limit = placed[index] - spacing
    return placed


def draw_limit(axes: Axes, name: str, gib: float) -> None:
    """A dashed line with a label at the limit of `name`."""
    axes.axhline(gib, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        f"{name}: {gib:.0f} GiB",
        xy=(0, gib),
        xycoords=("axes fraction", "data"),
        xytext=(4, -4),
        textcoords="offset points",
        va="top",
        color=MUTED,
        fontsize=10,
    )
