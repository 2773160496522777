"""How long each phase of one step took, and each part of bringing roles up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rljob_api.plan_change import Phase


class PhaseClock:
    """Seconds by phase, in the order in which the phases ran; a phase entered twice adds up.

    `on_phase` is told the name of each phase as it begins.
    """

    def __init__(self, on_phase: Callable[[Phase], None]) -> None:
        self._on_phase = on_phase
        self._begun = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        self._on_phase(name)
        with _added(self.seconds, name):
            yield

    @property
    def total_seconds(self) -> float:
        """Since the clock was made, time between phases included."""
        return time.perf_counter() - self._begun


class PartClock:
    """Seconds by part of what takes several, until they are taken; a part entered twice adds up."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        with _added(self._seconds, name):
            yield

    def take(self) -> dict[str, float]:
        """What has added up since the last time."""
        taken, self._seconds = self._seconds, {}
        return taken


@contextmanager
def _added(seconds: dict[str, float], name: str) -> Iterator[None]:
    begun = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begun
