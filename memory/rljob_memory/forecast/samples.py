"""What the forecast is fed: a step's samples, and the series of a process and phase that they make."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rljob_api.plan_change import Role

_WARM_UP_STEPS = 2
"""The optimizer's state, the first compilation, the largest cache of a kernel: made once, in the first steps."""
_MOST_STEPS = 32


class Sample(Protocol):
    """Memory of a process at the end of a phase, in bytes; `rljob_trainer.telemetry.memory.MemorySample` is one."""

    @property
    def allocated(self) -> int: ...
    @property
    def reserved(self) -> int: ...
    @property
    def peak_allocated(self) -> int: ...
    @property
    def peak_reserved(self) -> int: ...
    @property
    def inactive_split(self) -> int: ...
    @property
    def asleep(self) -> int: ...
    @property
    def alloc_retries(self) -> int: ...
    @property
    def device_free(self) -> int: ...
    @property
    def device_total(self) -> int: ...
    @property
    def rss(self) -> int: ...
    @property
    def host_used(self) -> int: ...
    @property
    def host_limit(self) -> int: ...
    @property
    def shm_used(self) -> int: ...
    @property
    def shm_size(self) -> int: ...


StepSamples = Mapping[str, Mapping[str, Sample]]
"""By actor (`policy-0`) and phase."""


@dataclass(frozen=True, slots=True)
class PhaseSeries:
    """Samples of one process at the end of one phase, a step after the other; never empty."""

    actor: str
    phase: str
    samples: tuple[Sample, ...]

    @property
    def last(self) -> Sample:
        return self.samples[-1]

    @property
    def role(self) -> Role:
        name = self.actor.partition("-")[0]
        return "policy" if name == "policy" else "rollout" if name == "rollout" else "controller"

    @property
    def rank(self) -> int:
        number = self.actor.rpartition("-")[2]
        return int(number) if number.isdigit() else 0

    def values(self, of: Callable[[Sample], int]) -> list[int]:
        return [of(sample) for sample in self.samples]


@dataclass(slots=True)
class History:
    """The latest steps of every process and phase, without those in which it warmed up."""

    _seen: dict[tuple[str, str], int] = field(default_factory=dict)
    _samples: dict[tuple[str, str], deque[Sample]] = field(default_factory=dict)

    def add(self, samples: StepSamples) -> None:
        for actor, phases in samples.items():
            for phase, sample in phases.items():
                key = actor, phase
                self._seen[key] = self._seen.get(key, 0) + 1
                if self._seen[key] > _WARM_UP_STEPS:
                    self._samples.setdefault(key, deque(maxlen=_MOST_STEPS)).append(sample)

    def clear(self) -> None:
        self._seen.clear()
        self._samples.clear()

    def series(self) -> Iterator[PhaseSeries]:
        for (actor, phase), samples in self._samples.items():
            yield PhaseSeries(actor, phase, tuple(samples))


def held(sample: Sample) -> int:
    """Of the device, by torch's allocator: what it has reserved but for what a sleeping engine gave back."""
    return sample.reserved - sample.asleep
