"""What lay in a run's fullest GPU from moment to moment, made of the logs of the processes that share it.

Without GPUs it is the same of the host's memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from rljob_trainer.ledger.records import role_of

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Level:
    """Bytes of one process. `in_use`: in tensors, or resident. `held`: with the allocator's cache."""

    in_use: int = 0
    held: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """From `time` (seconds since the epoch) until the next one. `others`: on the GPU, of nobody in `levels`.

    Within a phase the levels are the highest of it so far.
    """

    time: float
    step: int
    phase: str
    levels: dict[str, Level]
    others: int = 0

    @property
    def total(self) -> int:
        return sum(level.held for level in self.levels.values()) + self.others


@dataclass(frozen=True, slots=True)
class Band:
    """One phase of one step."""

    begin: float
    end: float
    step: int
    phase: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """`moments`: in their order, never empty. `roles`: in the order they are stacked. `limit_bytes`: 0 if unknown."""

    counts: Literal["device", "host"]
    rank: int
    roles: tuple[str, ...]
    moments: tuple[Moment, ...]
    bands: tuple[Band, ...]
    limit_bytes: int

    @property
    def begin(self) -> float:
        return self.moments[0].time

    @property
    def end(self) -> float:
        return self.moments[-1].time

    @property
    def fullest(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)

    def columns(self, begin: float, end: float, count: int) -> list[Moment]:
        """`count` equal stretches of time, each as its fullest moment."""
        times = [moment.time for moment in self.moments]
        edges = [*(begin + (end - begin) * number / count for number in range(count)), end]
        columns = []
        for left, right in pairwise(edges):
            first = max(bisect_right(times, left) - 1, 0)
            last = max(bisect_right(times, right) - 1, first)
            columns.append(max(self.moments[first : last + 1], key=lambda moment: moment.total))
        return columns


def memory_timeline(samples: Iterable[tuple[str, Line]], attempts: Sequence[float]) -> Timeline | None:
    """`samples`: lines of the memory logs by actor, each actor's in order. `attempts`: when they began; by then the
    processes of the one before have ended. None where no line says when its sample was taken, and of what phase.
    """
    by_rank: dict[int, list[tuple[str, Line]]] = defaultdict(list)
    for actor, line in samples:
        rank = actor.rpartition("-")[2]
        if rank.isdigit() and isinstance(line.get("time"), int | float) and "phase" in line:
            by_rank[int(rank)].append((role_of(actor), line))
    timelines = [_of_rank(rank, lines, attempts) for rank, lines in sorted(by_rank.items())]
    drawable = [timeline for timeline in timelines if timeline.moments]
    return max(drawable, key=lambda timeline: timeline.fullest.total, default=None)


# --- one rank ---


@dataclass(frozen=True, slots=True)
class _Change:
    """At `time` a process's level becomes `level`; None: all processes have ended. `free`: of the device, if known."""

    time: float
    role: str
    level: Level | None
    step: int = 0
    phase: str = ""
    free: int | None = None


@dataclass(slots=True)
class _Process:
    """What is known of a role's process while its lines are read."""

    last_time: float | None = None
    changes: list[_Change] = field(default_factory=list)


def _of_rank(rank: int, lines: Sequence[tuple[str, Line]], attempts: Sequence[float]) -> Timeline:
    total = max(int(line.get("device_total", 0)) for _, line in lines)
    on_device = total > 0
    processes: dict[str, _Process] = defaultdict(_Process)
    bands = set()
    for role, line in lines:
        _add(processes[role], role, line, on_device)
        if line.get("began") is not None and line.get("micro_batch") is None:
            bands.add(Band(line["began"], line["time"], line.get("step", 0), line["phase"]))
    ends = [_Change(time, "", None) for time in attempts]
    changes = sorted(
        [*ends, *(change for process in processes.values() for change in process.changes)], key=lambda c: c.time
    )
    return Timeline(
        counts="device" if on_device else "host",
        rank=rank,
        roles=tuple(sorted(processes, key=lambda role: (role != "policy", role))),
        # Of several at the same time only the last one lasted.
        moments=tuple({moment.time: moment for moment in _moments(changes, total)}.values()),
        bands=tuple(sorted(bands, key=lambda band: band.begin)),
        limit_bytes=total or max(int(line.get("host_limit", 0)) for _, line in lines),
    )


def _add(process: _Process, role: str, line: Line, on_device: bool) -> None:
    """A sample tells the highest of its stretch; that of a phase's end also what is left then."""
    time, step, phase = line["time"], line.get("step", 0), line["phase"]
    peak, rest = _levels(line, on_device)
    if (begin := _begin(process, line)) is not None:
        process.changes.append(_Change(begin, role, peak, step, phase))
    if line.get("micro_batch") is None:
        free = int(line["device_free"]) if on_device and "device_free" in line else None
        process.changes.append(_Change(time, role, rest, step, phase, free))
    process.last_time = time


def _begin(process: _Process, line: Line) -> float | None:
    """Where the stretch of a sample begins: at the one before, or with its phase. Between phases it has none."""
    if "began" not in line:
        return process.last_time
    began: float | None = line["began"]
    return began if began is None or process.last_time is None else max(began, process.last_time)


def _levels(line: Line, on_device: bool) -> tuple[Level, Level]:
    """The highest since the phase began, and now."""
    if not on_device:
        rest = line.get("rss", 0)
        peak = max(line.get("peak_rss", 0), rest)
        return Level(peak, peak), Level(rest, rest)
    asleep = line.get("asleep", 0)
    rest = _level(line.get("allocated", 0) - asleep, line.get("reserved", 0) - asleep)
    peak = _level(line.get("peak_allocated", 0) - asleep, line.get("peak_reserved", 0) - asleep)
    return Level(max(peak.in_use, rest.in_use), max(peak.held, rest.held)), rest


def _level(in_use: int, held: int) -> Level:
    """No less than nothing, and no more in use than is held, whatever a log says."""
    return Level(max(min(in_use, held), 0), max(held, 0))


def _moments(changes: Sequence[_Change], total: int) -> Iterable[Moment]:
    levels: dict[str, Level] = {}
    others = 0
    for change in changes:
        if change.level is None and not levels:
            continue
        levels = {} if change.level is None else {**levels, change.role: change.level}
        others = 0 if change.level is None else others
        if change.free is not None:
            others = max(total - change.free - sum(level.held for level in levels.values()), 0)
        yield Moment(change.time, change.step, change.phase, levels, others)
