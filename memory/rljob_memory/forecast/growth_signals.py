"""Signals that memory will run out, one function per kind of memory: the growth, and the room that is left for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from rljob_api.plan_change import Role
from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.forecast.phase_series import PhaseSeries
from rljob_memory.sample import MemorySample
from rljob_memory.sizes import MIB, human_bytes
from rljob_memory.trend import Trend, kendall_tau, ongoing_growth

_LEAST_GROWTH_BYTES = 64 * MIB
_LEAST_GROWTH_SHARE = 0.005
"""Of the whole memory. Smaller growth would take hundreds of steps, and host memory varies by as much."""
_MOSTLY = 0.5
_FALLING_TAU = -0.6


@dataclass(frozen=True, slots=True)
class GrowthSignal:
    """Memory that grows step by step, and the class of the failure it leads to."""

    failure_class: FailureClass
    series: PhaseSeries

    subject: str
    """The memory that grows, as the beginning of a sentence."""

    trend: Trend

    room_bytes: int
    """Room that is left for the growth. Negative if there is none."""

    confidence: float
    """Confidence in the class, from 0 to 1."""

    role: Role
    """Role of the process whose memory grows. Its rank is that of the series."""

    own_growth_bytes: int = 0
    """Growth that would end with that process; 0 if others may have grown."""

    @property
    def steps_left(self) -> int:
        return int(max(self.room_bytes, 0) / self.trend.slope_bytes)

    @property
    def message(self) -> str:
        trend = self.trend
        return (
            f"{self.subject} grew from {human_bytes(trend.first_bytes)} to {human_bytes(trend.last_bytes)} over "
            f"{trend.values} steps, {human_bytes(round(trend.slope_bytes))} per step; "
            f"{human_bytes(max(self.room_bytes, 0))} are left"
        )

    def numbers(self) -> dict[str, int]:
        own = {"own_growth_bytes": self.own_growth_bytes} if self.own_growth_bytes else {}
        return {
            **own,
            "first_bytes": self.trend.first_bytes,
            "last_bytes": self.trend.last_bytes,
            "growth_a_step_bytes": round(self.trend.slope_bytes),
            "room_bytes": max(self.room_bytes, 0),
            "steps_seen": self.trend.values,
            "alloc_retries": self.series.last.alloc_retries,
        }


def growth_signals(every: Sequence[PhaseSeries], *, engines_sleep: bool = False) -> Iterator[GrowthSignal]:
    """Every signal in the series, in no order. `engines_sleep`: beside the policy, during its update."""
    for series in every:
        if series.last.device_total_bytes:
            yield from _device_signals(series, every)
            if engines_sleep and (kept := _sleeping_engine_signal(series, every)):
                yield kept
        if host := _host_signal(series):
            yield host
        if shared := _shared_memory_signal(series):
            yield shared


def _device_signals(series: PhaseSeries, every: Sequence[PhaseSeries]) -> Iterator[GrowthSignal]:
    """Tensors that stay, or else a cache that stays, or else a cache that is returned but grows at its peak."""
    last, total = series.last, series.last.device_total_bytes
    in_phase = f"{series.actor} at the end of {series.phase}"
    if trend := _growth(series, attrgetter("allocated_bytes"), total):
        room = min(_own_room(series, every, attrgetter("peak_allocated_bytes")), _room_of_neighbors(series, every))
        subject = f"Memory in tensors of {in_phase}"
        yield GrowthSignal(FailureClass.RETAINED_GRAPH, series, subject, trend, room, 0.75, series.role)
    elif trend := _growth(series, attrgetter("held_bytes"), total):
        room = min(_own_room(series, every, attrgetter("peak_reserved_bytes")), _room_of_neighbors(series, every))
        is_stuck = last.inactive_split_bytes >= _MOSTLY * (last.reserved_bytes - last.allocated_bytes)
        cause = FailureClass.FRAGMENTATION if is_stuck else FailureClass.ALLOCATOR_CACHE
        yield GrowthSignal(cause, series, f"Memory that torch holds for {in_phase}", trend, room, 0.7, series.role)
    elif (trend := _growth(series, attrgetter("peak_reserved_bytes"), total)) and not _growth(
        series, attrgetter("peak_allocated_bytes"), total
    ):
        room = _own_room(series, every, attrgetter("peak_reserved_bytes"))
        subject = f"Peak memory that torch holds for {series.actor} in {series.phase}, unlike its tensors,"
        yield GrowthSignal(FailureClass.FRAGMENTATION, series, subject, trend, room, 0.65, series.role)


def _sleeping_engine_signal(series: PhaseSeries, every: Sequence[PhaseSeries]) -> GrowthSignal | None:
    """Memory that stays on a policy's GPU beside the policy at the end of its update: a sleeping engine keeps it."""
    if series.role != "policy" or series.phase != "update":
        return None
    trend = _growth(series, attrgetter("others_bytes"), series.last.device_total_bytes)
    if trend is None:
        return None
    room = _own_room(series, every, attrgetter("peak_reserved_bytes"))
    subject = f"GPU memory that rollout-{series.rank} keeps while it sleeps"
    cause = FailureClass.ENGINE_NOT_ASLEEP
    return GrowthSignal(cause, series, subject, trend, room, 0.75, "rollout", trend.growth_bytes)


def _host_signal(series: PhaseSeries) -> GrowthSignal | None:
    limit = series.last.host_limit_bytes
    trend = _growth(series, attrgetter("host_used_bytes"), limit)
    if trend is None:
        return None
    # The container's memory is that of all its processes; resident memory shows whether this one grows.
    own = _growth(series, attrgetter("rss_bytes"), limit)
    subject = f"Host memory in use beside {series.actor}"
    room, confidence = limit - trend.last_bytes, 0.65 if own is None else 0.75
    growth = 0 if own is None else own.growth_bytes
    return GrowthSignal(FailureClass.HOST_MEMORY, series, subject, trend, room, confidence, series.role, growth)


def _shared_memory_signal(series: PhaseSeries) -> GrowthSignal | None:
    size = series.last.shared_memory_bytes
    trend = _growth(series, attrgetter("shared_memory_used_bytes"), size)
    if trend is None:
        return None
    subject = f"Memory in use in /dev/shm of {series.actor}"
    room = size - trend.last_bytes
    return GrowthSignal(FailureClass.SHARED_MEMORY, series, subject, trend, room, 0.75, series.role)


def _growth(series: PhaseSeries, of: Callable[[MemorySample], int], whole_bytes: int) -> Trend | None:
    if not whole_bytes:
        return None
    return ongoing_growth(series.values(of), max(_LEAST_GROWTH_BYTES, _LEAST_GROWTH_SHARE * whole_bytes))


def _own_room(series: PhaseSeries, every: Sequence[PhaseSeries], peak: Callable[[MemorySample], int]) -> int:
    """Bytes by which `peak` could have been higher in the tightest phase of this process, all others unchanged."""
    mine = [other.last for other in every if other.actor == series.actor and other.last.device_total_bytes]
    return min(sample.device_free_bytes + sample.held_bytes - peak(sample) for sample in mine)


def _room_of_neighbors(series: PhaseSeries, every: Sequence[PhaseSeries]) -> int:
    """The least free memory of the other role of the same rank, on the same GPU, if its room shrinks."""
    others = [
        other
        for other in every
        if other.rank == series.rank and other.role != series.role and other.last.device_total_bytes
    ]
    shrinking = [other for other in others if _is_falling(other.values(attrgetter("device_free_bytes")))]
    return min((other.last.device_free_bytes for other in shrinking), default=series.last.device_total_bytes)


def _is_falling(values: Sequence[int]) -> bool:
    return len(values) > 1 and kendall_tau(values) <= _FALLING_TAU
