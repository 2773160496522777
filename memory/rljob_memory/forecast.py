"""Early warning: in how many steps memory will run out, and of which class, from the samples of each step."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from rljob_api.plan_change import DiagnosisStatus, Role
from rljob_api.step_report import MemoryPressure
from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.sample import MemorySample
from rljob_memory.sizes import MIB, human_bytes
from rljob_memory.trend import RECYCLE_STEPS, Trend, kendall_tau, ongoing_growth

_FARTHEST = 10
"""No further ahead than ten times the observed steps: a line through 12 steps does not predict the 2,000th."""
_SOON_STEPS = 20
_SURE = 0.7
_FIRM_BONUS = 0.05
_LONG_BONUS = 0.05
_LONG_STEPS = 16
_RETRIES_BONUS = 0.1

_PREVENTABLE = frozenset({FailureClass.RETAINED_GRAPH, FailureClass.ALLOCATOR_CACHE, FailureClass.FRAGMENTATION})
"""A live change acts on these. New processes act on memory that a policy rank or an engine itself keeps. The operator
raises the limit of a container. The others take new pods, which only a failure justifies."""


class Forecast:
    """Give it each committed step, then ask for the pressure. That costs next to nothing while no memory grows."""

    def __init__(self, steps: int | None = None) -> None:
        """`steps`: number in the whole job. Memory that would run out only after the last step is not reported."""
        self._steps = steps
        self._step = 0
        self._engine_steps: int | None = None
        """Steps in which the present engines slept next to the policy; None if they do not sleep."""
        self._seen = Counter[tuple[str, str]]()
        """Steps of each process and phase, by actor and phase, with those of its warm-up."""
        self._samples: dict[tuple[str, str], deque[MemorySample]] = {}
        """The samples of the latest steps, without those of the warm-up."""

    def observe(self, step: int, samples: StepSamples, *, engines_sleep: bool = False) -> None:
        """`samples`: at the end of each phase of `step`, by actor (`policy-0`) and phase. `engines_sleep`: next to the
        policy, during its update."""
        self._step = step
        self._engine_steps = (self._engine_steps or 0) + 1 if engines_sleep else None
        for actor, phases in samples.items():
            for phase, sample in phases.items():
                key = actor, phase
                self._seen[key] += 1
                if self._seen[key] > _WARM_UP_STEPS:
                    self._samples.setdefault(key, deque(maxlen=_MOST_STEPS)).append(sample)

    def forget(self, roles: Collection[Role] = ()) -> None:
        """Drop the history of all processes, or of those of `roles`: they are new, or work under another plan."""
        for actor, phase in list(self._seen):
            if not roles or _role(actor) in roles:
                del self._seen[actor, phase]
                self._samples.pop((actor, phase), None)
        if not roles or "rollout" in roles:
            self._engine_steps = None

    def pressure(self) -> MemoryPressure | None:
        """The memory that is projected to run out first; None if none will before the job is done."""
        series = [_PhaseSeries(*key, tuple(samples)) for key, samples in self._samples.items()]
        signals = _growth_signals(series, self._engine_steps)
        seen = [signal for signal in signals if signal.steps_left <= self._horizon(signal)]
        if not seen:
            return None
        first = min(seen, key=lambda signal: (signal.steps_left, -signal.confidence, -signal.own_growth_bytes))
        return MemoryPressure(
            diagnosis=DiagnosisStatus(
                class_name=str(first.failure_class),
                confidence=_confidence(first),
                message=f"{first.message}, enough for {_steps(first.steps_left)}.",
                numbers=first.numbers(),
            ),
            role=first.role,
            rank=first.series.rank,
            steps_left=first.steps_left,
        )

    def _horizon(self, signal: _GrowthSignal) -> int:
        farthest = _FARTHEST * signal.trend.values if signal.trend.is_clear else RECYCLE_STEPS
        return farthest if self._steps is None else min(farthest, self._steps - self._step)


def worth_preventing(pressure: MemoryPressure) -> bool:
    """True if something should be changed now: the failure is near and sure enough, and a cheap change acts on it."""
    diagnosis = pressure.diagnosis
    can_help = diagnosis.class_name in _PREVENTABLE or "own_growth_bytes" in diagnosis.numbers
    return can_help and diagnosis.confidence >= _SURE and pressure.steps_left <= _SOON_STEPS


def _confidence(signal: _GrowthSignal) -> float:
    """Higher if the trend is firm and long, and if the allocator already had to give its cache back."""
    trend, series = signal.trend, signal.series
    has_retried = series.last.alloc_retries > series.samples[0].alloc_retries
    bonus = _FIRM_BONUS * trend.is_firm + _LONG_BONUS * (trend.values >= _LONG_STEPS) + _RETRIES_BONUS * has_retried
    return round(min(signal.confidence + bonus, 0.95), 2)


def _steps(count: int) -> str:
    return "1 more step" if count == 1 else f"{count} more steps"


# Signals that memory will run out, one function per kind of memory: its growth, and the room that is left for it.

_LEAST_GROWTH_BYTES = 64 * MIB
_LEAST_GROWTH_SHARE = 0.005
"""Share of the whole memory. Smaller growth would take hundreds of steps, and host memory varies by as much."""
_MOSTLY = 0.5
_FALLING_TAU = -0.6


@dataclass(frozen=True, slots=True)
class _GrowthSignal:
    """Memory that grows step by step, and the class of the failure it leads to."""

    failure_class: FailureClass
    series: _PhaseSeries

    subject: str
    """The memory that grows, as the subject of a message."""

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
        of_host = self.failure_class is FailureClass.HOST_MEMORY
        limit = {"limit_bytes": self.series.last.host_limit_bytes} if of_host else {}
        return {
            **own,
            **limit,
            "first_bytes": self.trend.first_bytes,
            "last_bytes": self.trend.last_bytes,
            "growth_per_step_bytes": round(self.trend.slope_bytes),
            "room_bytes": max(self.room_bytes, 0),
            "steps_seen": self.trend.values,
            "alloc_retries": self.series.last.alloc_retries,
        }


def _growth_signals(every: Sequence[_PhaseSeries], engine_steps: int | None) -> Iterator[_GrowthSignal]:
    """Every signal in the series, in no order. `engine_steps`: those in which the present engines slept next to the
    policy."""
    for series in every:
        if series.last.device_total_bytes:
            yield from _device_signals(series, every)
            if engine_steps and (kept := _sleeping_engine_signal(series, every, engine_steps)):
                yield kept
        if host := _host_signal(series, every):
            yield host
        if shared := _shared_memory_signal(series):
            yield shared


def _device_signals(series: _PhaseSeries, every: Sequence[_PhaseSeries]) -> Iterator[_GrowthSignal]:
    """Tensors that stay, or else a cache that stays, or else a cache that is returned but grows at its peak."""
    last, total = series.last, series.last.device_total_bytes
    in_phase = f"{series.actor} at the end of {series.phase}"
    if trend := _growth(series, attrgetter("allocated_bytes"), total):
        room = min(_own_room(series, every, attrgetter("peak_allocated_bytes")), _room_of_neighbors(series, every))
        subject, growth = f"Memory in tensors of {in_phase}", trend.growth_bytes
        yield _GrowthSignal(FailureClass.RETAINED_GRAPH, series, subject, trend, room, 0.75, series.role, growth)
    elif trend := _growth(series, attrgetter("held_bytes"), total):
        room = min(_own_room(series, every, attrgetter("peak_reserved_bytes")), _room_of_neighbors(series, every))
        is_stuck = last.inactive_split_bytes >= _MOSTLY * (last.reserved_bytes - last.allocated_bytes)
        cause = FailureClass.FRAGMENTATION if is_stuck else FailureClass.ALLOCATOR_CACHE
        yield _GrowthSignal(cause, series, f"Memory that torch holds for {in_phase}", trend, room, 0.7, series.role)
    elif (trend := _growth(series, attrgetter("peak_reserved_bytes"), total)) and not _growth(
        series, attrgetter("peak_allocated_bytes"), total
    ):
        room = _own_room(series, every, attrgetter("peak_reserved_bytes"))
        subject = f"Peak memory that torch holds for {series.actor} in {series.phase}, unlike its tensors,"
        yield _GrowthSignal(FailureClass.FRAGMENTATION, series, subject, trend, room, 0.65, series.role)


def _sleeping_engine_signal(
    series: _PhaseSeries, every: Sequence[_PhaseSeries], engine_steps: int
) -> _GrowthSignal | None:
    """Memory that stays on a policy's GPU next to the policy at the end of its update: a sleeping engine keeps it."""
    if series.role != "policy" or series.phase != "update":
        return None
    own_steps = max(engine_steps - _WARM_UP_STEPS, 1)
    of_engine = replace(series, samples=series.samples[-own_steps:])
    trend = _growth(of_engine, attrgetter("others_bytes"), series.last.device_total_bytes)
    if trend is None:
        return None
    room = _own_room(series, every, attrgetter("peak_reserved_bytes"))
    subject = f"GPU memory that rollout-{series.rank} keeps while it sleeps"
    cause = FailureClass.ENGINE_NOT_ASLEEP
    return _GrowthSignal(cause, series, subject, trend, room, 0.75, "rollout", trend.growth_bytes)


def _host_signal(series: _PhaseSeries, every: Sequence[_PhaseSeries]) -> _GrowthSignal | None:
    """The memory of the container is that of all its processes; anonymous memory shows whether this one grows."""
    limit = series.last.host_limit_bytes
    own = _growth(series, attrgetter("anonymous_bytes"), limit)
    trends = [trend for trend in (own, _growth(series, attrgetter("host_used_bytes"), limit)) if trend is not None]
    if not trends:
        return None
    subject = f"Host memory {'of' if own else 'in the container of'} {series.actor}"
    fastest, room = max(trends, key=attrgetter("slope_bytes")), _host_room(series, every)
    confidence, growth = (0.65, 0) if own is None else (0.75, own.growth_bytes)
    return _GrowthSignal(FailureClass.HOST_MEMORY, series, subject, fastest, room, confidence, series.role, growth)


def _host_room(series: _PhaseSeries, every: Sequence[_PhaseSeries]) -> int:
    """Bytes by which host memory could have been higher in the tightest phase of the processes of this rank."""
    limit = series.last.host_limit_bytes
    beside = [other.last for other in every if other.rank == series.rank and other.last.host_limit_bytes == limit]
    return min(limit - last.host_used_bytes - max(last.peak_rss_bytes - last.rss_bytes, 0) for last in beside)


def _shared_memory_signal(series: _PhaseSeries) -> _GrowthSignal | None:
    size = series.last.shared_memory_bytes
    trend = _growth(series, attrgetter("shared_memory_used_bytes"), size)
    if trend is None:
        return None
    subject = f"Memory in use in /dev/shm of {series.actor}"
    room = size - trend.last_bytes
    return _GrowthSignal(FailureClass.SHARED_MEMORY, series, subject, trend, room, 0.75, series.role)


def _growth(series: _PhaseSeries, of: Callable[[MemorySample], int], whole_bytes: int) -> Trend | None:
    if not whole_bytes:
        return None
    return ongoing_growth(series.values(of), max(_LEAST_GROWTH_BYTES, _LEAST_GROWTH_SHARE * whole_bytes))


def _own_room(series: _PhaseSeries, every: Sequence[_PhaseSeries], peak: Callable[[MemorySample], int]) -> int:
    """Bytes by which `peak` could have been higher in the tightest phase of this process, all others unchanged."""
    mine = [other.last for other in every if other.actor == series.actor and other.last.device_total_bytes]
    return min(sample.device_free_bytes + sample.held_bytes - peak(sample) for sample in mine)


def _room_of_neighbors(series: _PhaseSeries, every: Sequence[_PhaseSeries]) -> int:
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


# Memory of each process at the end of each phase, over the latest steps.

_WARM_UP_STEPS = 2
"""The optimizer's state, the first compilation, the largest cache of a kernel: made once, in the first steps."""
_MOST_STEPS = 32

StepSamples = Mapping[str, Mapping[str, MemorySample]]
"""Samples of one step, by actor (`policy-0`) and phase."""


@dataclass(frozen=True, slots=True)
class _PhaseSeries:
    """Samples of one process at the end of one phase."""

    actor: str
    """`policy-0`."""

    phase: str

    samples: tuple[MemorySample, ...]
    """One per step, oldest first; never empty."""

    @property
    def last(self) -> MemorySample:
        return self.samples[-1]

    @property
    def role(self) -> Role:
        return _role(self.actor)

    @property
    def rank(self) -> int:
        number = self.actor.rpartition("-")[2]
        return int(number) if number.isdigit() else 0

    def values(self, of: Callable[[MemorySample], int]) -> list[int]:
        return [of(sample) for sample in self.samples]


def _role(actor: str) -> Role:
    name = actor.partition("-")[0]
    return "policy" if name == "policy" else "rollout" if name == "rollout" else "controller"
