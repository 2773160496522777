"""Refusals of the API server for a job. In memory only: after a restart of the operator they are repeated."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

_FOREIGN_POD_REMEMBERED_SECONDS = 30.0
"""Time after which a name that a foreign pod had is tried again."""


@dataclass(slots=True)
class ApiRefusals:
    """The refusals of one job."""

    refused: str | None = None
    """The API server's message about an object that it refused."""
    missing_object: str | None = None
    """Message about an object that the job names and that does not exist."""
    foreign_object: str | None = None
    """Message about an object that is not the job's and has a name that the job needs."""
    left_behind: str | None = None
    """Message about an object of a deleted job of the same name."""
    namespace_terminating: bool = False
    _taken_until: dict[str, float] = field(default_factory=dict)
    _clock: Callable[[], float] = time.monotonic

    def name_taken(self, pod: str) -> None:
        """Record that a foreign pod has a name that the job needs."""
        self._taken_until[pod] = self._clock() + _FOREIGN_POD_REMEMBERED_SECONDS

    def taken_names(self) -> tuple[str, ...]:
        now = self._clock()
        return tuple(sorted(name for name, until in self._taken_until.items() if now < until))

    def accepted(self) -> None:
        """Clear the refusals: all objects of the job were created."""
        self.refused = None
        self.namespace_terminating = False
        self._taken_until.clear()
