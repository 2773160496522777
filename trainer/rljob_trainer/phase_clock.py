"""Durations of the phases of a step, or of the parts of a start-up or recovery."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PartClock:
    """Seconds by part of a longer operation, in the order in which the parts ran. Repeated parts add up."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure the block as a part of the operation."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun

    @property
    def total_seconds(self) -> float:
        """Seconds since the clock was created, including the time between parts."""
        return time.perf_counter() - self._begun

    def take(self) -> dict[str, float]:
        """The seconds since the last call, by part."""
        taken, self.seconds = self.seconds, {}
        return taken
