"""The memory timeline: memory by role over time, with phases, failures and plan changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from rljob_trainer.ledger.records import PHASES
from rljob_trainer.plot.memory_timeline import Band, Moment, Timeline
from rljob_trainer.plot.style import (
    GIB,
    MUTED,
    OTHER_COLOUR,
    draw_limit,
    label_right,
    phase_colour,
    stacked_figure,
)

_COLUMNS = 900
_ROLE_COLOURS = {"policy": "#d55e00", "rollout": "#0072b2"}
_FAILURE_COLOUR = "#b00020"
_PREVENTION_COLOUR = "#00695c"
_CLOSE_UP_STEPS = 3
_FEW_STEPS = 6
"""A run of at most this many steps needs no close-up."""
_WORTH_A_LABEL = 0.015
_MOST_BANDS = 150
"""More would not be legible."""
_TICK_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000)
_TICK_ROOM = 0.045
_LEGEND: dict[str, Any] = {
    "frameon": False,
    "borderaxespad": 0.2,
    "handlelength": 0.9,
    "handletextpad": 0.4,
    "columnspacing": 1.1,
}
_COUNTED = {
    "device": "GPU {rank}: memory held by torch for each role (dark: in tensors, light: cached) and by others.",
    "host": "Resident host memory of rank {rank}'s processes.",
}


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark on the timeline."""

    time: float
    """Seconds since the epoch."""

    text: str

    failure: bool
    """False: a preventive change."""


@dataclass(frozen=True, slots=True)
class _Layer:
    name: str
    colour: str
    alpha: float
    gib: np.ndarray[tuple[int], np.dtype[np.float64]]


def draw_timeline(timeline: Timeline, marks: Sequence[Mark], attempts: Sequence[float]) -> Figure:
    """Draw the whole run, and below it a close-up of its last steps, or of those around its last mark."""
    fullest = timeline.fullest
    steps = sorted({band.step for band in timeline.bands})
    close_up = _close_up(timeline, marks) if len(steps) > _FEW_STEPS else None
    figure, rows = stacked_figure(
        _title(timeline, fullest),
        _COUNTED[timeline.counts].format(rank=timeline.rank) + " On top: phases.",
        rows=2 if close_up else 1,
    )
    near_limit = fullest.total > 0.5 * timeline.limit_bytes > 0
    height = 1.12 * max(fullest.total, timeline.limit_bytes if near_limit else 0) / GIB
    windows = [(timeline.begin, timeline.end), *([close_up] if close_up else [])]
    for axes, (begin, end) in zip(rows, windows, strict=True):
        axes.set_ylim(0, height)
        axes.set_xlim(begin, end)
        axes.set_ylabel("GiB")
        _draw_layers(axes, timeline, begin, end)
        _draw_bands(axes, timeline, begin, end)
        _draw_attempts(axes, [time for time in attempts if begin < time < end])
        _draw_marks(axes, [mark for mark in marks if begin <= mark.time <= end], height)
        if near_limit:
            draw_limit(axes, "the GPU" if timeline.counts == "device" else "the limit", timeline.limit_bytes / GIB)
    rows[-1].set_xlabel("step")
    return figure


def _title(timeline: Timeline, fullest: Moment) -> str:
    where = f"in step {fullest.step}'s {fullest.phase}" if fullest.phase else f"in step {fullest.step}"
    of_all = f" of {timeline.limit_bytes / GIB:.1f}" if timeline.limit_bytes else ""
    what = f"Memory of GPU {timeline.rank}" if timeline.counts == "device" else "Host memory"
    return f"{what} peaked {where}: {_shown(fullest.total / GIB)}{of_all} GiB"


def _shown(gib: float) -> str:
    return f"{gib:.1f}" if gib >= 10 else f"{gib:.2f}"


def _close_up(timeline: Timeline, marks: Sequence[Mark]) -> tuple[float, float]:
    """The time range around the last mark, with the steps before it; without a mark, the last steps."""
    last = max((mark.time for mark in marks), default=timeline.end)
    begins = sorted({band.step: band.begin for band in reversed(timeline.bands)}.values())
    before = [begin for begin in begins if begin <= last]
    after = [band.end for band in timeline.bands if band.end > last]
    begin = before[-min(_CLOSE_UP_STEPS, len(before))] if before else timeline.begin
    return begin, min(after[:_CLOSE_UP_STEPS][-1:] or [timeline.end])


# --- parts of the plot ---


def _draw_layers(axes: Axes, timeline: Timeline, begin: float, end: float) -> None:
    edges = np.linspace(begin, end, _COLUMNS + 1)
    layers = _layers(timeline, timeline.columns(begin, end, _COLUMNS))
    top = np.zeros(_COLUMNS)
    labels = []
    for layer in layers:
        base, top = top, top + layer.gib
        axes.stairs(top, edges, baseline=base, fill=True, color=layer.colour, alpha=layer.alpha, linewidth=0)
        highest = float(layer.gib.max())
        if highest >= _WORTH_A_LABEL * axes.get_ylim()[1]:
            labels.append((f"{layer.name}  {_shown(highest)}", float(base[-1] + layer.gib[-1] / 2), layer.colour))
    label_right(axes, labels)


def _layers(timeline: Timeline, columns: Sequence[Moment]) -> list[_Layer]:
    """The layers from bottom to top. The cache of a role is above its tensors."""
    layers = []
    for role in timeline.roles:
        levels = [column.levels.get(role) for column in columns]
        in_use = np.array([level.in_use if level else 0 for level in levels]) / GIB
        cached = np.array([level.held - level.in_use if level else 0 for level in levels]) / GIB
        colour = _ROLE_COLOURS.get(role, OTHER_COLOUR)
        layers += [_Layer(role, colour, 0.85, in_use), _Layer(f"{role}, cached", colour, 0.35, cached)]
    others = np.array([column.others for column in columns]) / GIB
    return [layer for layer in [*layers, _Layer("others", OTHER_COLOUR, 0.6, others)] if layer.gib.any()]


def _draw_bands(axes: Axes, timeline: Timeline, begin: float, end: float) -> None:
    """Draw the phases as a strip along the top, and the step numbers."""
    bands = [band for band in timeline.bands if band.end > begin and band.begin < end]
    _step_ticks(axes, bands)
    if len(bands) > _MOST_BANDS:
        return
    for band in bands:
        axes.axvspan(band.begin, band.end, ymin=0.955, ymax=1, color=phase_colour(band.phase), alpha=0.9, linewidth=0)
    phases = [phase for phase in (*PHASES, "load") if any(band.phase == phase for band in bands)]
    axes.legend(
        handles=[Patch(color=phase_colour(phase), label=phase) for phase in phases],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(phases),
        fontsize=9,
        labelcolor=MUTED,
        **_LEGEND,
    )


def _step_ticks(axes: Axes, bands: Sequence[Band]) -> None:
    """Label round step numbers at the start of their steps, as many as fit."""
    begins: dict[int, float] = {}
    for band in bands:
        if band.step:
            begins[band.step] = min(begins.get(band.step, band.begin), band.begin)
    begin, end = axes.get_xlim()
    shown = [step for step in sorted(begins) if begin <= begins[step] <= end]
    room = _TICK_ROOM * (end - begin)
    for size in _TICK_SIZES:
        ticks = [step for step in shown if step % size == 0]
        if all(begins[b] - begins[a] >= room for a, b in pairwise(ticks)):
            break
    axes.set_xticks([begins[step] for step in ticks], [str(step) for step in ticks])


def _draw_attempts(axes: Axes, attempts: Sequence[float]) -> None:
    for time in attempts:
        axes.axvline(time, color=MUTED, linewidth=1, linestyle=(0, (1, 2)))


def _draw_marks(axes: Axes, marks: Sequence[Mark], height: float) -> None:
    """Draw failures as crosses and preventive changes as triangles, with their texts below each other."""
    begin, end = axes.get_xlim()
    for number, mark in enumerate(marks):
        colour = _FAILURE_COLOUR if mark.failure else _PREVENTION_COLOUR
        y = height * (0.8 - 0.07 * (number % 4))
        axes.axvline(mark.time, color=colour, linewidth=1, alpha=0.7)
        axes.plot([mark.time], [y], marker="X" if mark.failure else "v", color=colour, markersize=8, clip_on=False)
        on_the_left = mark.time > (begin + end) / 2
        axes.annotate(
            mark.text,
            xy=(mark.time, y),
            xytext=(-8 if on_the_left else 8, 0),
            textcoords="offset points",
            ha="right" if on_the_left else "left",
            va="center",
            color=colour,
            fontsize=9.5,
            bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1.5},
        )
