"""The schedule of reports. Pure: the caller passes the time."""

from __future__ import annotations

INTERVAL_SECONDS = 5.0
_LONGEST_BACKOFF_SECONDS = 60.0


class SendSchedule:
    """At most one report per interval, urgent ones at once, and fewer after failures. Times are in seconds."""

    def __init__(self, longest_backoff_seconds: float = _LONGEST_BACKOFF_SECONDS) -> None:
        self._longest_backoff_seconds = longest_backoff_seconds
        self._next_regular = 0.0
        self._next_allowed = 0.0
        self._failures = 0

    def wait_seconds(self, now: float, *, urgent: bool) -> float:
        """Seconds until a report may be sent; 0: send it now."""
        due = self._next_allowed if urgent else max(self._next_regular, self._next_allowed)
        return max(0.0, due - now)

    def succeeded(self, now: float) -> None:
        self._failures = 0
        self._next_regular = now + INTERVAL_SECONDS
        self._next_allowed = now

    def failed(self, now: float, retry_after_seconds: float = 0.0) -> None:
        """`retry_after_seconds`: as requested by the API server."""
        self._failures += 1
        backoff = min(INTERVAL_SECONDS * 2 ** (self._failures - 1), self._longest_backoff_seconds)
        self._next_allowed = now + max(backoff, retry_after_seconds)
