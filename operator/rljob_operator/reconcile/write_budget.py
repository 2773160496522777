"""The rate of writes of a job's status. Pods cause them by their reports, and the operator makes them: without a limit,
one job could load the API server past the limits on its own account."""

from __future__ import annotations

from dataclasses import dataclass, replace

BURST = 10.0
SECONDS_PER_WRITE = 2.0


@dataclass(frozen=True, slots=True)
class WriteBudget:
    """A token bucket of one job: BURST writes at once, then one in SECONDS_PER_WRITE. Times are seconds of any clock.

    Every write takes a token. A write that decisions rest on does not wait for one.
    """

    tokens: float = BURST
    counted_at: float = 0.0

    def seconds_left(self, now: float) -> float:
        """Seconds until a write that only reports may be made; 0: now."""
        return max(0.0, 1.0 - self._tokens(now)) * SECONDS_PER_WRITE

    def after_write(self, now: float) -> WriteBudget:
        return replace(self, tokens=max(0.0, self._tokens(now) - 1.0), counted_at=now)

    def _tokens(self, now: float) -> float:
        return min(BURST, self.tokens + max(0.0, now - self.counted_at) / SECONDS_PER_WRITE)
