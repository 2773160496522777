"""Which jobs are to be looked at, and when."""

from __future__ import annotations

import asyncio
import random
from collections import deque

from rljob_operator.kube.watch import Key
from rljob_operator.metrics import QUEUE_DEPTH

_FIRST_BACKOFF_SECONDS = 0.25
_LONGEST_BACKOFF_SECONDS = 60.0


class WorkQueue:
    """Keys of jobs, first come first served. A key is in it once, however often it was added; one that is added while
    it is worked on comes again afterwards; no two workers have the same key at a time.

    Each key has at most one time to look again: the last one given counts. Keys that fail come again after a wait of
    their own that doubles, whatever happens to others.
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
        """Something has changed about this job."""
        if key in self._at_work:
            self._again.add(key)
        elif key not in self._queued:
            self._queued.add(key)
            self._ready.append(key)
            QUEUE_DEPTH.set(len(self._ready))
            self._arrival.set()

    def look_again(self, key: Key, after_seconds: float | None) -> None:
        """Look again after so long, whatever happens; None: only when something happens."""
        if timer := self._timers.pop(key, None):
            timer.cancel()
        if after_seconds is not None:
            loop = asyncio.get_running_loop()
            self._timers[key] = loop.call_later(max(after_seconds, 0.0), self._ring, key)

    def failed(self, key: Key) -> float:
        """Look again after a wait that doubles from failure to failure; the seconds of it are returned."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        longest = min(_FIRST_BACKOFF_SECONDS * 2.0 ** min(failures - 1, 16), _LONGEST_BACKOFF_SECONDS)
        wait_seconds = longest * random.uniform(0.5, 1.0)
        self.look_again(key, wait_seconds)
        return wait_seconds

    def succeeded(self, key: Key) -> None:
        """The next failure is the first again."""
        self._failures.pop(key, None)

    async def get(self) -> Key | None:
        """The next key, which is then worked on until `done`; None: the queue is closed."""
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
        """The key's worker has finished with it."""
        self._at_work.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def close(self) -> None:
        """Nothing more is given out."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._arrival.set()

    def _ring(self, key: Key) -> None:
        del self._timers[key]
        self.add(key)
