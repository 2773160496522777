"""Memory on a run's fullest GPU over time, from the logs of the processes that share it.

Without GPUs it is the same for host memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rljob_client.run_directory.records import role_of
from rljob_memory.sample import MemorySample


@dataclass(frozen=True, slots=True)
class Level:
    """Memory of one process, in bytes."""

    in_use: int = 0
    """Bytes in tensors; without a GPU, resident bytes."""

    held: int = 0
    """Bytes in tensors and in the allocator's cache."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Memory from one time until the next moment."""

    time: float
    """Seconds since the epoch."""

    step: int
    phase: str

    levels: dict[str, Level]
    """Level by role. Within a phase, the highest so far."""

    others: int = 0
    """GPU memory of all other processes, in bytes."""

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
    """Memory of one GPU, or of the host, over a run."""

    counts: Literal["device", "host"]
    rank: int

    roles: tuple[str, ...]
    """Roles, in the order in which they are stacked."""

    moments: tuple[Moment, ...]
    """In order of time."""

    bands: tuple[Band, ...]

    limit_bytes: int
    """Size of the GPU, or limit of the host memory; 0 if unknown."""

    @property
    def begin(self) -> float:
        return self.moments[0].time

    @property
    def end(self) -> float:
        return self.moments[-1].time

    @property
    def fullest(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)


def memory_timeline(samples: Iterable[tuple[str, MemorySample]], attempts: Sequence[float]) -> Timeline | None:
    """The timeline of the fullest GPU; None if no sample has a time and a phase.

    `samples`: by actor, each actor's in order. `attempts`: when each began. By then, the processes of the previous one
    have ended; they are drawn for a few seconds after their last sample.
    """
    by_rank: dict[int, list[tuple[str, MemorySample]]] = defaultdict(list)
    for actor, sample in samples:
        rank = actor.rpartition("-")[2]
        if rank.isdigit() and sample.time is not None and sample.phase is not None:
            by_rank[int(rank)].append((role_of(actor), sample))
    timelines = [_of_rank(rank, of_rank, attempts) for rank, of_rank in sorted(by_rank.items())]
    drawable = [timeline for timeline in timelines if timeline.moments]
    return max(drawable, key=lambda timeline: timeline.fullest.total, default=None)


# --- one rank ---


@dataclass(frozen=True, slots=True)
class _Change:
    """A process reaches another level."""

    time: float
    role: str

    level: Level | None
    """None: all processes have ended."""

    step: int = 0
    phase: str = ""

    device_free_bytes: int | None = None
    """None if unknown."""


@dataclass(slots=True)
class _Process:
    """A role's process while its samples are read."""

    last_time: float | None = None
    changes: list[_Change] = field(default_factory=list)


def _of_rank(rank: int, samples: Sequence[tuple[str, MemorySample]], attempts: Sequence[float]) -> Timeline:
    total = max(sample.device_total_bytes for _, sample in samples)
    on_device = total > 0
    processes: dict[str, _Process] = defaultdict(_Process)
    bands = set()
    for role, sample in samples:
        _add(processes[role], role, sample, on_device)
        if sample.began is not None and sample.time is not None and sample.micro_batch is None:
            bands.add(Band(sample.began, sample.time, sample.step or 0, sample.phase or ""))
    ends = [_Change(_end_before(attempt, samples), "", None) for attempt in attempts]
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
        limit_bytes=total or max(sample.host_limit_bytes for _, sample in samples),
    )


_EXIT_SECONDS = 10.0
"""Assumed seconds between the last sample of a process and its end, which is not logged. A run may pause for days
then."""


def _end_before(attempt: float, samples: Sequence[tuple[str, MemorySample]]) -> float:
    """Time at which the processes before the attempt have ended."""
    times = (sample.time for _, sample in samples if sample.time is not None and sample.time < attempt)
    return min(max(times, default=attempt) + _EXIT_SECONDS, attempt)


def _add(process: _Process, role: str, sample: MemorySample, on_device: bool) -> None:
    """A sample has the peak of the stretch before it; the one at the end of a phase also has what is left then."""
    assert sample.time is not None, "samples without a time are left out"
    step, phase = sample.step or 0, sample.phase or ""
    peak, rest = _levels(sample, on_device)
    if sample.began is not None:
        begin = sample.began if process.last_time is None else max(sample.began, process.last_time)
        process.changes.append(_Change(begin, role, peak, step, phase))
    if sample.micro_batch is None:
        # The log leaves out zeros: a device without free memory looks like an unknown one.
        free = sample.device_free_bytes or None if on_device else None
        process.changes.append(_Change(sample.time, role, rest, step, phase, free))
    process.last_time = sample.time


def _levels(sample: MemorySample, on_device: bool) -> tuple[Level, Level]:
    """The highest level since the phase began, and the present one."""
    if not on_device:
        peak = max(sample.peak_rss_bytes, sample.rss_bytes)
        return Level(peak, peak), Level(sample.rss_bytes, sample.rss_bytes)
    asleep = sample.asleep_bytes
    rest = _level(sample.allocated_bytes - asleep, sample.held_bytes)
    peak_level = _level(sample.peak_allocated_bytes - asleep, sample.peak_reserved_bytes - asleep)
    return Level(max(peak_level.in_use, rest.in_use), max(peak_level.held, rest.held)), rest


def _level(in_use: int, held: int) -> Level:
    """A level that is not negative and has no more in use than is held, even for a damaged log."""
    return Level(max(min(in_use, held), 0), max(held, 0))


def _moments(changes: Sequence[_Change], total: int) -> Iterable[Moment]:
    levels: dict[str, Level] = {}
    others = 0
    for change in changes:
        if change.level is None and not levels:
            continue
        levels = {} if change.level is None else {**levels, change.role: change.level}
        others = 0 if change.level is None else others
        if change.device_free_bytes is not None:
            others = max(total - change.device_free_bytes - sum(level.held for level in levels.values()), 0)
        yield Moment(change.time, change.step, change.phase, levels, others)
