"""Elapsed and remaining time, in seconds."""

from __future__ import annotations

from datetime import datetime


def elapsed_seconds(since: datetime, now: datetime) -> float:
    """Never negative: another machine's clock may be ahead."""
    return max(0.0, (now - since).total_seconds())


def soonest(*seconds_left: float | None) -> float | None:
    """The smallest number that is not None; None if there is none."""
    return min((seconds for seconds in seconds_left if seconds is not None), default=None)
