"""How long each phase of one step took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseClock:
    """Seconds by phase, in the order in which the phases ran; a phase entered twice adds up."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun

    @property
    def total_seconds(self) -> float:
        """Since the clock was made, time between phases included."""
        return time.perf_counter() - self._begun
