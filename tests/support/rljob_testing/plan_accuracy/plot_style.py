"""Style of the plot: colors, fonts, frame and titles."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK = "#1f2933"
MUTED = "#66727f"
GRID = "#e4e7eb"

PHASE_COLORS = {
    "rollout": "#0072b2",
    "reward": "#cc79a7",
    "update": "#d55e00",
    "sync": "#009e73",
    "checkpoint": "#e0a100",
    "load": "#56b4e9",
}
"""Distinguishable with color blindness. Source: Okabe and Ito, Color Universal Design (2008); yellow darkened."""

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


def titled_figure(title: str, subtitle: str, panels: int) -> tuple[Figure, list[Axes]]:
    """A figure with `panels` side by side that share the y axis, with a title and a subtitle."""
    figure = Figure(layout="constrained")
    height = figure.get_figheight()
    figure.set_figheight(height)
    figure.get_layout_engine().set(rect=(0.01, 0.01, 0.98, 1 - 0.86 / height), w_pad=0.1)  # type: ignore[union-attr, call-arg]
    figure.text(0.022, 1 - 0.216 / height, title, fontsize=15, fontweight="bold", va="top")
    figure.text(0.022, 1 - 0.552 / height, subtitle, fontsize=10.5, color=MUTED, va="top")
    return figure, list(figure.subplots(1, panels, sharey=True, squeeze=False).flat)
