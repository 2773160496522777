"""Durations: of each phase of a step, and of each part of a start-up or recovery."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rljob_api.plan_change import Phase


class PhaseClock:
    """Seconds by phase, in the order in which the phases ran. Repeated phases add up."""

    def __init__(self, on_phase: Callable[[Phase], None]) -> None:
        """`on_phase`: called with the name of each phase when it begins."""
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
        """Seconds since the clock was created, including the time between phases."""
        return time.perf_counter() - self._begun


class PartClock:
    """Seconds by part of a longer operation, until they are taken. Repeated parts add up."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        with _added(self._seconds, name):
            yield

    def take(self) -> dict[str, float]:
        """The seconds since the last call, by part."""
        taken, self._seconds = self._seconds, {}
        return taken


@contextmanager
def _added(seconds: dict[str, float], name: str) -> Iterator[None]:
    begun = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begun
