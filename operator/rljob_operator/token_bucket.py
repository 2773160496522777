"""A limit on the rate of writes."""

from __future__ import annotations


class TokenBucket:
    """A token bucket: `burst` at once, then one every `seconds_per_token`. Times are seconds of any clock."""

    def __init__(self, burst: int, seconds_per_token: float) -> None:
        self._burst = burst
        self._seconds_per_token = seconds_per_token
        self._left = float(burst)
        self._counted_at = 0.0

    def seconds_left(self, now: float) -> float:
        """Return the seconds until there is a token; 0: there is one now."""
        return max(0.0, 1.0 - self._tokens(now)) * self._seconds_per_token

    def take(self, now: float) -> None:
        """Take a token. A write that does not wait for one takes what is left of it."""
        self._left, self._counted_at = max(0.0, self._tokens(now) - 1.0), now

    def _tokens(self, now: float) -> float:
        return min(self._burst, self._left + max(0.0, now - self._counted_at) / self._seconds_per_token)
