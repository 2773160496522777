"""Memory of each process at the end of each phase, over the latest steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from rljob_api.plan_change import Role
from rljob_memory.sample import MemorySample

_WARM_UP_STEPS = 2
"""The optimizer's state, the first compilation, the largest cache of a kernel: made once, in the first steps."""
_MOST_STEPS = 32

StepSamples = Mapping[str, Mapping[str, MemorySample]]
"""Samples of one step, by actor (`policy-0`) and phase."""


@dataclass(frozen=True, slots=True)
class PhaseSeries:
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
        name = self.actor.partition("-")[0]
        return "policy" if name == "policy" else "rollout" if name == "rollout" else "controller"

    @property
    def rank(self) -> int:
        number = self.actor.rpartition("-")[2]
        return int(number) if number.isdigit() else 0

    def values(self, of: Callable[[MemorySample], int]) -> list[int]:
        return [of(sample) for sample in self.samples]


@dataclass(slots=True)
class StepHistory:
    """The latest steps of every process and phase, without the steps of its warm-up."""

    _seen: dict[tuple[str, str], int] = field(default_factory=dict)
    _samples: dict[tuple[str, str], deque[MemorySample]] = field(default_factory=dict)

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
