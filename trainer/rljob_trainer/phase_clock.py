"""How long each phase of one step took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rljob_api.step_report import Phase


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
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun

    @property
    def total_seconds(self) -> float:
        """Since the clock was made, time between phases included."""
        return time.perf_counter() - self._begun
