"""The queue of jobs to reconcile, with back-off and requeue times."""

from __future__ import annotations

import asyncio
import random
from collections import deque

from rljob_operator.kube.watch import Key
from rljob_operator.metrics import QUEUE_DEPTH

_FIRST_BACKOFF_SECONDS = 0.25
_LONGEST_BACKOFF_SECONDS = 60.0


class WorkQueue:
    """Keys of jobs, first in, first out.

    A key is queued at most once. A key that is added while a worker has it is queued again afterwards, so no two
    workers have the same key. Each key has at most one requeue time: the last one set. A key that fails is requeued
    after its own back-off, which doubles with each failure.
    """

    def __init__(self) -> None:
        self._ready: deque[Key] = deque()
        self._queued: set[Key] = set()
        self._at_work: set[Key] = set()
        self._again: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._arrival = asyncio.Event()
        self._closed = False

    def add(self, key: Key) -> None:
        """Queue the job now: something about it has changed."""
        if key in self._at_work:
            self._again.add(key)
        elif key not in self._queued:
            self._queued.add(key)
            self._ready.append(key)
            QUEUE_DEPTH.set(len(self._ready))
            self._arrival.set()

    def requeue(self, key: Key, after_seconds: float | None) -> None:
        """Queue the job after this time; None cancels the timer, so that only a change queues it."""
        if timer := self._timers.pop(key, None):
            timer.cancel()
        if after_seconds is not None:
            loop = asyncio.get_running_loop()
            self._timers[key] = loop.call_later(max(after_seconds, 0.0), self._ring, key)

    def failed(self, key: Key) -> float:
        """Requeue the job after its back-off, and return that in seconds."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        longest = min(_FIRST_BACKOFF_SECONDS * 2.0 ** min(failures - 1, 16), _LONGEST_BACKOFF_SECONDS)
        wait_seconds = longest * random.uniform(0.5, 1.0)
        self.requeue(key, wait_seconds)
        return wait_seconds

    def succeeded(self, key: Key) -> None:
        """Reset the back-off of the job."""
        self._failures.pop(key, None)

    async def get(self) -> Key | None:
        """Return the next key, which the caller has until `done`; None once the queue is closed."""
        while not self._closed:
            if self._ready:
                key = self._ready.popleft()
                self._queued.discard(key)
                self._at_work.add(key)
                QUEUE_DEPTH.set(len(self._ready))
                return key
            self._arrival.clear()
            await self._arrival.wait()
        return None

    def done(self, key: Key) -> None:
        """Give the key back."""
        self._at_work.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def close(self) -> None:
        """Stop: `get` returns None from now on."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._arrival.set()

    def _ring(self, key: Key) -> None:
        del self._timers[key]
        self.add(key)
