"""What the API server refused to do for a job. Kept in memory only: after a restart it is refused again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

_FOREIGN_POD_REMEMBERED_SECONDS = 30.0
"""A name that was taken is tried again after so long: whoever took it may be gone."""


@dataclass(slots=True)
class ApiRefusals:
    """The refusals of one job."""

    refused: str | None = None
    """The API server's sentence about an object that it does not take."""
    namespace_terminating: bool = False
    _taken_until: dict[str, float] = field(default_factory=dict)
    _clock: Callable[[], float] = time.monotonic

    def name_taken(self, pod: str) -> None:
        """A pod that is not the job's has a name that the job needs."""
        self._taken_until[pod] = self._clock() + _FOREIGN_POD_REMEMBERED_SECONDS

    def taken_names(self) -> tuple[str, ...]:
        now = self._clock()
        return tuple(sorted(name for name, until in self._taken_until.items() if now < until))

    def accepted(self) -> None:
        """Everything that was to be made for the job has been made."""
        self.refused = None
        self.namespace_terminating = False
        self._taken_until.clear()
