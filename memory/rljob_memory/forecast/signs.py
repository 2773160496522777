"""The signs that memory will run out, one function a kind of memory: what rises, and how much room it has left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.estimate import MIB
from rljob_memory.evidence.sizes import human_bytes
from rljob_memory.forecast.samples import PhaseSeries, Sample, held
from rljob_memory.forecast.trend import Rise, kendall_tau, rising

_LEAST_GROWTH_BYTES = 64 * MIB
_LEAST_GROWTH_SHARE = 0.005
"""Of all there is. Growth below these would take hundreds of steps, and the host's memory wavers by as much."""
_MOSTLY = 0.5
_FALLING_TAU = -0.6


@dataclass(frozen=True, slots=True)
class Sign:
    """`what` rises by `rise.slope` bytes a step, with `room_bytes` left for it."""

    failure_class: FailureClass
    series: PhaseSeries
    what: str
    rise: Rise
    room_bytes: int
    confidence: float

    @property
    def steps_left(self) -> int:
        return int(max(self.room_bytes, 0) / self.rise.slope)

    @property
    def sentence(self) -> str:
        rise = self.rise
        return (
            f"{self.what} rose from {human_bytes(rise.first)} to {human_bytes(rise.last)} over {rise.values} steps, "
            f"{human_bytes(round(rise.slope))} a step; {human_bytes(max(self.room_bytes, 0))} are left"
        )

    def numbers(self) -> dict[str, int]:
        return {
            "first_bytes": self.rise.first,
            "last_bytes": self.rise.last,
            "growth_a_step_bytes": round(self.rise.slope),
            "room_bytes": max(self.room_bytes, 0),
            "steps_seen": self.rise.values,
            "alloc_retries": self.series.last.alloc_retries,
        }


def signs(every: Sequence[PhaseSeries]) -> Iterator[Sign]:
    """Every sign that the series show, in no order."""
    for series in every:
        if series.last.device_total:
            yield from _device_signs(series, every)
        if host := _host_sign(series):
            yield host
        if shared := _shared_memory_sign(series):
            yield shared


def _device_signs(series: PhaseSeries, every: Sequence[PhaseSeries]) -> Iterator[Sign]:
    """Tensors that stay, or else a cache that stays, or else one that is returned but grows at its peak."""
    last, total = series.last, series.last.device_total
    in_phase = f"{series.actor} at the end of {series.phase}"
    if rise := _rise(series, attrgetter("allocated"), total):
        room = min(_own_room(series, every, attrgetter("peak_allocated")), _neighbours_room(series, every))
        yield Sign(FailureClass.RETAINED_GRAPH, series, f"Memory in tensors of {in_phase}", rise, room, 0.75)
    elif rise := _rise(series, held, total):
        room = min(_own_room(series, every, attrgetter("peak_reserved")), _neighbours_room(series, every))
        stuck = last.inactive_split >= _MOSTLY * (last.reserved - last.allocated)
        cause = FailureClass.FRAGMENTATION if stuck else FailureClass.ALLOCATOR_CACHE
        yield Sign(cause, series, f"Memory that torch holds for {in_phase}", rise, room, 0.7)
    elif (rise := _rise(series, attrgetter("peak_reserved"), total)) and not _rise(
        series, attrgetter("peak_allocated"), total
    ):
        room = _own_room(series, every, attrgetter("peak_reserved"))
        what = f"The most that torch held for {series.actor} in {series.phase}, for tensors that grew no larger,"
        yield Sign(FailureClass.FRAGMENTATION, series, what, rise, room, 0.65)


def _host_sign(series: PhaseSeries) -> Sign | None:
    limit = series.last.host_limit
    rise = _rise(series, attrgetter("host_used"), limit)
    if rise is None:
        return None
    # The container's memory is that of all its processes: whose it is, its own resident memory says.
    own = _rise(series, attrgetter("rss"), limit) is not None
    what = f"Host memory in use where {series.actor} runs"
    return Sign(FailureClass.HOST_MEMORY, series, what, rise, limit - rise.last, 0.75 if own else 0.65)


def _shared_memory_sign(series: PhaseSeries) -> Sign | None:
    size = series.last.shm_size
    rise = _rise(series, attrgetter("shm_used"), size)
    if rise is None:
        return None
    what = f"Memory in use in /dev/shm where {series.actor} runs"
    return Sign(FailureClass.SHARED_MEMORY, series, what, rise, size - rise.last, 0.75)


def _rise(series: PhaseSeries, of: Callable[[Sample], int], whole: int) -> Rise | None:
    return rising(series.values(of), max(_LEAST_GROWTH_BYTES, _LEAST_GROWTH_SHARE * whole)) if whole else None


def _own_room(series: PhaseSeries, every: Sequence[PhaseSeries], peak: Callable[[Sample], int]) -> int:
    """How much higher `peak` of this process could have been in its tightest phase, the others staying as they were."""
    mine = [other.last for other in every if other.actor == series.actor and other.last.device_total]
    return min(sample.device_free + held(sample) - peak(sample) for sample in mine)


def _neighbours_room(series: PhaseSeries, every: Sequence[PhaseSeries]) -> int:
    """The least that is free for others of the same rank whose room shrinks: they are on the same GPU."""
    others = [
        other for other in every if other.rank == series.rank and other.role != series.role and other.last.device_total
    ]
    shrinking = [other for other in others if _falls(other.values(attrgetter("device_free")))]
    return min((other.last.device_free for other in shrinking), default=series.last.device_total)


def _falls(values: Sequence[int]) -> bool:
    return len(values) > 1 and kendall_tau(values) <= _FALLING_TAU
