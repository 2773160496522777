"""The time limit of the work in progress. Calls to role processes carry it, and so do the calls that these make."""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

GRACE_SECONDS = 5.0
"""Seconds that the caller waits longer than the called process, which writes its stacks at the limit."""


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """A limit for all calls within a block."""

    seconds: float
    ends_at: float
    """Time on this process's monotonic clock."""

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.ends_at - time.monotonic())


_current: ContextVar[TimeLimit | None] = ContextVar("time_limit", default=None)


def current_limit() -> TimeLimit | None:
    """The limit of the innermost block; None: there is none."""
    return _current.get()


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Limit calls to role processes within the block, instead of any outer limit. None: no limit."""
    limit = None if seconds is None else TimeLimit(seconds, time.monotonic() + seconds)
    token = _current.set(limit)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def stacks_written_after(seconds: float | None) -> Iterator[None]:
    """Write the stacks of all threads to stderr, a role process's log, if the block takes longer.

    They are written without Python's lock, and so also if native code never releases it.
    """
    if seconds is None:
        yield
        return
    faulthandler.dump_traceback_later(max(seconds, 0.001), exit=False)
    try:
        with time_limit(seconds):
            yield
    finally:
        faulthandler.cancel_dump_traceback_later()
