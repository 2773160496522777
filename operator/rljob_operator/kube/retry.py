"""Retries of requests, with back-off."""

from __future__ import annotations

import random
from dataclasses import dataclass

from rljob_operator.kube.errors import Unavailable


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """At most `attempts` tries, with waits that double from `first_seconds` to `longest_seconds`, and jitter."""

    attempts: int = 5
    first_seconds: float = 0.2
    longest_seconds: float = 5.0
    longest_retry_after_seconds: float = 30.0

    def wait_seconds(self, tries: int, error: Unavailable) -> float | None:
        """Seconds until the next try, after `tries` tries; at least what the API server asks for. None to give up."""
        if tries >= self.attempts:
            return None
        backoff = min(self.first_seconds * 2.0 ** (tries - 1), self.longest_seconds)
        asked_for = min(error.retry_after_seconds or 0.0, self.longest_retry_after_seconds)
        return max(backoff * random.uniform(0.5, 1.0), asked_for)
