"""The time axis of the memory timeline: a start-up or a pause must not fill it, and many steps must still fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rljob_client.plot.memory_timeline import Band, Timeline
from rljob_client.plot.style import Values

_LONGEST_GAP = 0.06
"""Of the time of the steps."""

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """Maps times to positions on the axis. Both are in seconds and differ only by the shortened gaps."""

    times: Sequence[float]
    """At which a gap begins or ends; the first and the last are those of the timeline."""

    positions: Sequence[float]
    """On the axis, of `times`."""

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
