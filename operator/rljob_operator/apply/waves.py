"""Concurrent writes for one job, in waves that grow while all writes succeed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from rljob_operator.kube.lease import LeadershipLost

FIRST_WAVE = 4
LARGEST_WAVE = 16
"""A job of a thousand pods must not keep the requests of all other jobs waiting."""

Write = Callable[[], Coroutine[Any, Any, None]]


async def in_waves(writes: Sequence[Write], first: int = FIRST_WAVE) -> None:
    """Run `writes`: `first` at once, then waves of twice the size, at most LARGEST_WAVE.

    A failure ends the waves, so that a refusal by a quota costs few requests. The other writes of its wave are
    finished. Raises the error of the first write that failed, in the order of `writes`, or LeadershipLost.
    """
    begin, size = 0, min(first, LARGEST_WAVE)
    while begin < len(writes):
        wave = writes[begin : begin + size]
        done = await asyncio.gather(*(write() for write in wave), return_exceptions=True)
        errors = [result for result in done if result is not None]
        if errors:
            raise next((error for error in errors if isinstance(error, LeadershipLost)), errors[0])
        begin, size = begin + len(wave), min(2 * size, LARGEST_WAVE)
