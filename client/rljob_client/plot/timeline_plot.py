"""The memory timeline: memory by role over time, with phases, failures and plan changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from rljob_client.plot.memory_timeline import Band, Moment, Timeline
from rljob_client.plot.style import (
    FAILURE_COLOR,
    GIB,
    INK,
    MUTED,
    OTHER_COLOR,
    PHASE_COLORS,
    Values,
    draw_limit,
    label_right,
    phase_color,
    stacked_figure,
)

_COLUMNS = 900
"""Intervals of the time axis for which memory is drawn."""
ROLE_COLORS = {"policy": "#6a51a3", "rollout": "#8c6d31"}
"""None of them is the color of a phase."""
_CLOSE_UP_STEPS = 3
_FEW_STEPS = 6
"""A run of at most this many steps needs no close-up."""
_WORTH_A_LABEL = 0.015
"""Share of the plot's height from which a layer gets a label."""
_STRIP_BOTTOM = 0.955
"""Lower edge of the strip of phases, as a share of the plot's height."""
_MOST_BANDS = 200
"""Bands that the strip draws one by one. More would not be legible."""
_STRIP_COLUMNS = 100
"""Intervals of the strip if it has more than `_MOST_BANDS` bands."""
_TICK_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000)
_TICK_ROOM = 0.045
"""Smallest distance between two step numbers, as a share of the plot's width."""
_LEGEND: dict[str, Any] = {
    "frameon": False,
    "borderaxespad": 0.2,
    "handlelength": 0.9,
    "handletextpad": 0.4,
    "columnspacing": 1.1,
}
_COUNTED = {
    "device": "Held by torch for each role (dark: in tensors, light: cached), and by others.",
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
    color: str
    alpha: float
    gib: Values


def draw_timeline(timeline: Timeline, marks: Sequence[Mark], attempts: Sequence[float]) -> Figure:
    """Draw the whole run, and below it a close-up of its last steps, or of those around its last mark."""
    fullest = timeline.fullest
    steps = sorted({band.step for band in timeline.bands})
    close_up = _close_up(timeline, marks) if len(steps) > _FEW_STEPS else None
    figure, rows = stacked_figure(
        _title(timeline, fullest),
        _COUNTED[timeline.counts].format(rank=timeline.rank) + " Strip: phases, by share of time.",
        rows=2 if close_up else 1,
    )
    near_limit = fullest.total > 0.5 * timeline.limit_bytes > 0
    height = 1.12 * max(fullest.total, timeline.limit_bytes if near_limit else 0) / GIB
    time = time_axis(timeline)
    windows = [("whole run", timeline.begin, timeline.end)]
    if close_up:
        windows.append(("around the last mark" if marks else f"last {_CLOSE_UP_STEPS} steps", *close_up))
    for axes, (name, begin, end) in zip(rows, windows, strict=True):
        axes.set_title(name, loc="left", fontsize=11, color=INK)
        axes.set_ylim(0, height)
        axes.set_xlim(*time.at([begin, end]))
        axes.set_ylabel("GiB")
        axes.set_xlabel("time; a number is at the start of its step")
        edges = np.linspace(*axes.get_xlim(), _COLUMNS + 1)
        _draw_layers(axes, timeline.columns([*map(float, time.times_at(edges))]), timeline.roles, edges)
        _draw_strip(axes, timeline.bands, time, edges)
        _draw_gaps(axes, time, begin, end)
        _draw_attempts(axes, time, [attempt for attempt in attempts if begin < attempt < end])
        _draw_marks(axes, time, [mark for mark in marks if begin <= mark.time <= end], height)
        if near_limit:
            draw_limit(axes, "the GPU" if timeline.counts == "device" else "the limit", timeline.limit_bytes / GIB)
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


def _draw_layers(axes: Axes, columns: Sequence[Moment], roles: Sequence[str], edges: Values) -> None:
    layers = _layers(columns, roles)
    top = np.zeros(_COLUMNS)
    labels = []
    for layer in layers:
        base, top = top, top + layer.gib
        axes.stairs(top, edges, baseline=base, fill=True, color=layer.color, alpha=layer.alpha, linewidth=0)
        highest = float(layer.gib.max())
        if highest >= _WORTH_A_LABEL * axes.get_ylim()[1]:
            labels.append((f"{layer.name}  {_shown(highest)}", float(base[-1] + layer.gib[-1] / 2), layer.color))
    label_right(axes, labels)


def _layers(columns: Sequence[Moment], roles: Sequence[str]) -> list[_Layer]:
    """The layers from bottom to top. The cache of a role is above its tensors."""
    layers = []
    for role in roles:
        levels = [column.levels.get(role) for column in columns]
        in_use = np.array([level.in_use if level else 0 for level in levels]) / GIB
        cached = np.array([level.held - level.in_use if level else 0 for level in levels]) / GIB
        color = ROLE_COLORS.get(role, OTHER_COLOR)
        layers += [_Layer(role, color, 0.85, in_use), _Layer(f"{role}, cached", color, 0.35, cached)]
    others = np.array([column.others for column in columns]) / GIB
    return [layer for layer in [*layers, _Layer("others", OTHER_COLOR, 0.6, others)] if layer.gib.any()]


def _draw_strip(axes: Axes, bands: Sequence[Band], time: TimeAxis, edges: Values) -> None:
    """Draw the phases as a strip along the top, and the step numbers. Phases that are too short share a column."""
    shown = [band for band in bands if band.end > time.times_at(edges)[0] and band.begin < time.times_at(edges)[-1]]
    if len(shown) > _MOST_BANDS:
        edges = np.linspace(*axes.get_xlim(), _STRIP_COLUMNS + 1)
    times = time.times_at(edges)
    _step_ticks(axes, shown, time)
    phases = sorted({band.phase for band in shown}, key=[*PHASE_COLORS, *(band.phase for band in shown)].index)
    shares = [phase_shares(shown, phase, times) for phase in phases]
    # Phases may overlap: with stale rollouts, one step is generated while another is learned from.
    whole = np.maximum(1.0, np.sum(shares, axis=0))
    top = np.full(len(edges) - 1, _STRIP_BOTTOM)
    for phase, share in zip(phases, shares, strict=True):
        base, top = top, top + (1 - _STRIP_BOTTOM) * share / whole
        color, transform = phase_color(phase), axes.get_xaxis_transform()
        axes.stairs(top, edges, baseline=base, fill=True, color=color, linewidth=0, transform=transform)
    axes.legend(
        handles=[Patch(color=phase_color(phase), label=phase) for phase in phases],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=max(1, len(phases)),
        fontsize=9,
        labelcolor=MUTED,
        **_LEGEND,
    )


def _draw_gaps(axes: Axes, time: TimeAxis, begin: float, end: float) -> None:
    """Fade the shortened gaps, and state how long they were."""
    for gap in time.gaps:
        left, right = time.at(gap)
        if gap[1] <= begin or gap[0] >= end:
            continue
        axes.axvspan(left, right, ymax=_STRIP_BOTTOM, color="white", alpha=0.6, linewidth=0)
        name = "loading" if gap[0] == time.times[0] else "no step for"
        axes.text(
            (max(left, axes.get_xlim()[0]) + min(right, axes.get_xlim()[1])) / 2,
            0.04,
            f"{name} {_duration(gap[1] - gap[0])}",
            transform=axes.get_xaxis_transform(),
            rotation=90,
            ha="center",
            va="bottom",
            color=INK,
            fontsize=9,
        )


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.0f} h"
    )


def _step_ticks(axes: Axes, bands: Sequence[Band], time: TimeAxis) -> None:
    """Label round step numbers at the start of their steps, as many as fit."""
    begins: dict[int, float] = {}
    for band in bands:
        if band.step:
            at = float(time.at(band.begin))
            begins[band.step] = min(begins.get(band.step, at), at)
    begin, end = axes.get_xlim()
    shown = [step for step in sorted(begins) if begin <= begins[step] <= end]
    room = _TICK_ROOM * (end - begin)
    for size in _TICK_SIZES:
        ticks = [step for step in shown if step % size == 0]
        if all(begins[b] - begins[a] >= room for a, b in pairwise(ticks)):
            break
    axes.set_xticks([begins[step] for step in ticks], [str(step) for step in ticks])


def _draw_attempts(axes: Axes, time: TimeAxis, attempts: Sequence[float]) -> None:
    for attempt in attempts:
        axes.axvline(float(time.at(attempt)), color=MUTED, linewidth=1, linestyle=(0, (1, 2)))


def _draw_marks(axes: Axes, time: TimeAxis, marks: Sequence[Mark], height: float) -> None:
    """Draw failures as crosses and preventive changes as triangles, with their texts below each other."""
    begin, end = axes.get_xlim()
    for number, mark in enumerate(marks):
        color = FAILURE_COLOR if mark.failure else INK
        x = float(time.at(mark.time))
        y = height * (0.8 - 0.07 * (number % 4))
        axes.axvline(x, color=color, linewidth=1, alpha=0.7)
        axes.plot([x], [y], marker="X" if mark.failure else "v", color=color, markersize=8, clip_on=False)
        on_the_left = x > (begin + end) / 2
        axes.annotate(
            mark.text,
            xy=(x, y),
            xytext=(-8 if on_the_left else 8, 0),
            textcoords="offset points",
            ha="right" if on_the_left else "left",
            va="center",
            color=color,
            fontsize=9.5,
            bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1.5},
        )


_LONGEST_GAP = 0.06
"""Share of the seconds of all steps: a longer gap is drawn with this length."""

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """Maps times to positions on the axis. Both are in seconds and differ only by the shortened gaps."""

    times: Sequence[float]
    """Times at which a gap begins or ends, with the beginning and the end of the timeline."""

    positions: Sequence[float]
    """Position on the axis of each of `times`."""

    gaps: Sequence[Interval]
    """Times without a step that are shortened."""

    def at(self, times: float | Sequence[float]) -> Values:
        """Positions of times. [n] → [n]"""
        return np.asarray(np.interp(times, self.times, self.positions), np.float64)

    def times_at(self, positions: Values) -> Values:
        """Times of positions. [n] → [n]"""
        return np.asarray(np.interp(positions, self.positions, self.times), np.float64)


def time_axis(timeline: Timeline) -> TimeAxis:
    """The axis of a timeline. Without a step, nothing is shortened."""
    busy = union((band.begin, band.end) for band in timeline.bands if band.step)
    longest = _LONGEST_GAP * sum(end - begin for begin, end in busy)
    between = pairwise([timeline.begin, *(time for interval in busy for time in interval), timeline.end])
    gaps = [(begin, end) for begin, end in list(between)[::2] if busy and end - begin > longest]
    times = sorted({timeline.begin, *(time for gap in gaps for time in gap), timeline.end})
    positions = [timeline.begin]
    for stretch in pairwise(times):
        positions.append(positions[-1] + (longest if stretch in gaps else stretch[1] - stretch[0]))
    return TimeAxis(times, positions, gaps)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The times that any of the intervals covers, as intervals in order that do not overlap."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def phase_shares(bands: Iterable[Band], phase: str, edges: Values) -> Values:
    """The share of each stretch between two edges, in time, that the phase covers: 0 to 1. [edges - 1]"""
    covered = union((band.begin, band.end) for band in bands if band.phase == phase)
    if not covered:
        return np.zeros(len(edges) - 1)
    lengths = [end - begin for begin, end in covered]
    until = np.repeat(np.cumsum([0.0, *lengths]), 2)[1:-1]
    seconds = np.diff(np.interp(edges, np.ravel(covered), until))
    return np.asarray(seconds / np.maximum(np.diff(edges), 1e-9), np.float64)
