"""The memory timeline: memory by role over time, with phases, attempts, failures and changes of the memory plan."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from typing import Any

from rljob_client.report.charts import OTHER_COLOR, PHASE_COLORS, Chart
from rljob_client.report.memory_timeline import Band, Moment, Timeline
from rljob_memory.sizes import GIB, human_bytes

_MOST_MOMENTS = 5000
_MOST_BANDS = 1500
_SHORTEST_PAUSE_SECONDS = 60.0
_SHORT_RUN_SECONDS = 300.0
_NEAR_LIMIT = 0.3
"""Share of the limit from which it is drawn: a lower memory would be flattened."""
FAILURE_COLOR = "#d6304a"
ROLE_COLORS = {"policy": "141,121,199", "rollout": "161,131,60"}
"""Red, green and blue. None of them is the color of a phase."""
_OTHERS = "138,148,158"
_COUNTED = {
    "device": "Held by torch for each role (dark: in tensors, light: cached), and by other processes.",
    "host": "Resident host memory of the processes of rank {rank}.",
}


@dataclass(frozen=True, slots=True)
class Mark:
    """A failure, or a change of the memory plan."""

    time: float
    """Seconds since the epoch."""

    text: str
    failure: bool


@dataclass(frozen=True, slots=True)
class Clock:
    """Time of a run without the pauses in which it had no process."""

    begin: float
    """Seconds since the epoch."""

    pauses: Sequence[tuple[float, float]]
    """Begin and end of each, in order."""

    unit_seconds: int = 60

    def at(self, time: float) -> float:
        """Units since the begin."""
        before = self.pauses[: bisect_left(self.pauses, (time, time))]
        paused = sum(min(end, time) - begin for begin, end in before)
        return round((time - self.begin - paused) / self.unit_seconds, 4)


def clock_of(timeline: Timeline) -> Clock:
    """The clock of a timeline. A pause lasts from the end of all processes to the next sample."""
    pauses = [
        (before.time, after.time)
        for before, after in pairwise(timeline.moments)
        if not before.levels and after.time - before.time > _SHORTEST_PAUSE_SECONDS
    ]
    is_short = timeline.end - timeline.begin < _SHORT_RUN_SECONDS
    return Clock(timeline.begin, pauses, unit_seconds=1 if is_short else 60)


def timeline_chart(timeline: Timeline, marks: Sequence[Mark], attempts: Sequence[float]) -> Chart:
    """Layers of memory in GiB, above a lane for each phase. `attempts`: when each began, in seconds since the epoch."""
    clock, fullest = clock_of(timeline), timeline.fullest
    bands = timeline.bands[-_MOST_BANDS:]
    traces = [*_layers(_thinned(timeline.moments), timeline.roles, clock), *_lanes(bands, clock)]
    top = fullest.total / GIB
    limit = timeline.limit_bytes / GIB
    shapes = [_vertical(clock.at(begin), "dot", OTHER_COLOR) for begin in attempts if begin > timeline.begin]
    shapes += [_vertical(clock.at(mark.time), "solid", FAILURE_COLOR) for mark in marks]
    if marks:
        traces.append(_marks(marks, clock, top))
    if is_near := limit > 0 and top > _NEAR_LIMIT * limit:
        dashed = {"dash": "dash", "width": 1.5, "color": FAILURE_COLOR}
        shapes.append({"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": limit, "y1": limit, "line": dashed})
    unit = "seconds" if clock.unit_seconds == 1 else "minutes"
    layout = {
        "xaxis": {
            **{"title": {"text": f"{unit}, without pauses" if clock.pauses else unit}, "anchor": "y2"},
            "range": [0, clock.at(timeline.end)],
        },
        "yaxis": {
            "domain": [0.27, 1],
            "range": [0, 1.08 * max(top, limit if is_near else 0)],
            "title": {"text": "GiB"},
        },
        "yaxis2": {"domain": [0, 0.22], "fixedrange": True, "showgrid": False, "autorange": "reversed"},
        "barmode": "overlay",
        "shapes": shapes,
        "showlegend": True,
        "hovermode": "x",
    }
    return Chart("Memory over time", _note(timeline, is_near), traces, layout, is_wide=True, height=460)


def _note(timeline: Timeline, is_near: bool) -> str:
    fullest = timeline.fullest
    place = f"step {fullest.step}, {fullest.phase}" if fullest.phase else f"step {fullest.step}"
    what = f"GPU {timeline.rank}, the fullest" if timeline.counts == "device" else "The host"
    limit = f" of {human_bytes(timeline.limit_bytes)}" if timeline.limit_bytes else ""
    drawn = " (dashed)" if is_near else ""
    parts = [
        f"{what}: at most {human_bytes(fullest.total)}{limit}{drawn}, in {place}.",
        _COUNTED[timeline.counts].format(rank=timeline.rank),
        "Dotted lines: attempts. Red lines: failures and changes of the memory plan.",
    ]
    if len(timeline.moments) > _MOST_MOMENTS:
        parts.append(f"{len(timeline.moments):,} samples, drawn by the fullest of each stretch.")
    if len(timeline.bands) > _MOST_BANDS:
        parts.append(f"Phases: the last {_MOST_BANDS:,} of {len(timeline.bands):,}.")
    return " ".join(parts)


def _thinned(moments: Sequence[Moment]) -> list[Moment]:
    """At most `_MOST_MOMENTS`: the fullest of each stretch, at the time of its first."""
    size = -(-len(moments) // _MOST_MOMENTS)
    parts = (moments[begin : begin + size] for begin in range(0, len(moments), size))
    return [replace(max(part, key=lambda moment: moment.total), time=part[0].time) for part in parts]


def _layers(moments: Sequence[Moment], roles: Sequence[str], clock: Clock) -> list[dict[str, Any]]:
    """The layers from bottom to top. The cache of a role is above its tensors."""
    layers: list[tuple[str, str, list[int]]] = []
    for role in roles:
        levels = [moment.levels.get(role) for moment in moments]
        color = ROLE_COLORS.get(role, _OTHERS)
        layers.append((role, f"rgba({color},0.9)", [level.in_use if level else 0 for level in levels]))
        cached = [level.held - level.in_use if level else 0 for level in levels]
        layers.append((f"{role}, cached", f"rgba({color},0.4)", cached))
    layers.append(("other processes", f"rgba({_OTHERS},0.6)", [moment.others for moment in moments]))
    xs = [clock.at(moment.time) for moment in moments]
    return [
        {"name": name, "x": xs, "y": [round(size / GIB, 4) for size in sizes], "stackgroup": "memory", "mode": "lines"}
        | {"line": {"width": 0, "shape": "hv"}, "fillcolor": color, "hovertemplate": "%{y:.2f} GiB"}
        for name, color, sizes in layers
        if any(sizes)
    ]


def _lanes(bands: Sequence[Band], clock: Clock) -> list[dict[str, Any]]:
    """A lane for each phase, since phases overlap with stale rollouts."""
    lanes = []
    order = [*PHASE_COLORS, *(band.phase for band in bands)]
    for phase in sorted({band.phase for band in bands}, key=order.index):
        own = [band for band in bands if band.phase == phase]
        begins, ends = (
            [clock.at(time) for time in times] for times in zip(*((b.begin, b.end) for b in own), strict=True)
        )
        lanes.append(
            {"type": "bar", "orientation": "h", "yaxis": "y2", "name": phase, "showlegend": False, "base": begins}
            | {"x": [round(end - begin, 4) for begin, end in zip(begins, ends, strict=True)], "y": [phase] * len(own)}
            | {"marker": {"color": PHASE_COLORS.get(phase, OTHER_COLOR), "line": {"width": 0}}, "width": 0.8}
            | {"text": [f"step {band.step}" for band in own], "textposition": "none", "hovertemplate": "%{text}"}
        )
    return lanes


def _vertical(x: float, dash: str, color: str) -> dict[str, Any]:
    line = {"dash": dash, "width": 1.5, "color": color}
    return {"type": "line", "yref": "paper", "x0": x, "x1": x, "y0": 0.27, "y1": 1, "line": line}


def _marks(marks: Sequence[Mark], clock: Clock, top: float) -> dict[str, Any]:
    symbols = ["x" if mark.failure else "triangle-down" for mark in marks]
    return {
        "name": "failures and changes",
        "x": [clock.at(mark.time) for mark in marks],
        "y": [round(top * (1.0 - 0.06 * (number % 4)), 4) for number in range(len(marks))],
        "text": [escape(mark.text) for mark in marks],
        "mode": "markers",
        "marker": {"symbol": symbols, "size": 10, "color": FAILURE_COLOR},
        "hovertemplate": "%{text}<extra></extra>",
    }
