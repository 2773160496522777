"""Common style of the plots: colours, fonts, frames, and labels beside the lines instead of legends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK = "#1f2933"
MUTED = "#66727f"
GRID = "#e4e7eb"

PHASE_COLOURS = {
    "rollout": "#0072b2",
    "reward": "#cc79a7",
    "update": "#d55e00",
    "sync": "#009e73",
    "checkpoint": "#e0a100",
}
"""Distinguishable with colour blindness. Source: Okabe and Ito, Color Universal Design (2008); yellow darkened."""
OTHER_COLOUR = "#8a949e"
GIB = 2**30

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
    "lines.solid_capstyle": "round",
    # Text stays text in the SVG: searchable, and in the reader's own font.
    "svg.fonttype": "none",
    "svg.hashsalt": "rljob",
}


def phase_colour(phase: str) -> str:
    return PHASE_COLOURS.get(phase, OTHER_COLOUR)


def titled_figure(title: str, subtitle: str, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with `panels` side by side that share the y axis, with a title and a subtitle."""
    figure = _with_title(Figure(layout="constrained"), title, subtitle)
    return figure, list(figure.subplots(1, panels, sharey=True, squeeze=False)[0])


def stacked_figure(title: str, subtitle: str, rows: int) -> tuple[Figure, list[Axes]]:
    """A figure with `rows` of panels below each other, with a title and a subtitle."""
    figure = Figure(layout="constrained")
    figure.set_figheight(figure.get_figheight() * (1 + 0.6 * (rows - 1)))
    _with_title(figure, title, subtitle)
    return figure, list(figure.subplots(rows, 1, squeeze=False)[:, 0])


def _with_title(figure: Figure, title: str, subtitle: str) -> Figure:
    """Add both above the panels, in a space of fixed height."""
    height = figure.get_figheight()
    figure.get_layout_engine().set(rect=(0.01, 0.01, 0.98, 1 - 0.86 / height), w_pad=0.1)  # type: ignore[union-attr, call-arg]
    figure.text(0.022, 1 - 0.216 / height, title, fontsize=15, fontweight="bold", va="top")
    figure.text(0.022, 1 - 0.552 / height, subtitle, fontsize=10.5, color=MUTED, va="top")
    return figure


def step_axis(axes: Axes, first: int, last: int) -> None:
    """An x axis of whole steps, from `first` to `last`."""
    axes.set_xlim(first - 0.5, last + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.set_xlabel("step")


def label_right(axes: Axes, labels: Sequence[tuple[str, float, str]]) -> None:
    """Write each `(text, y, colour)` right of the axes at height `y`, moved apart if they would overlap."""
    bottom, top = axes.get_ylim()
    height_points = axes.get_position().height * axes.figure.get_figheight() * 72  # type: ignore[union-attr]
    spacing = 14 / height_points * (top - bottom)
    for (text, _, colour), y in zip(labels, spread([y for _, y, _ in labels], spacing, bottom, top), strict=True):
        axes.annotate(
            text,
            xy=(1, y),
            xycoords=("axes fraction", "data"),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=colour,
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
