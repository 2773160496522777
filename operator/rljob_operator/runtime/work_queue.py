"""The queue of jobs to reconcile, with back-off and requeue times."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from rljob_operator.kube.watch import Key
from rljob_operator.runtime.fair_order import FairOrder, Priority
from rljob_operator.runtime.queue_metrics import QueueMetrics

_FIRST_BACKOFF_SECONDS = 0.25
_LONGEST_BACKOFF_SECONDS = 60.0


class WorkQueue:
    """Keys of jobs: running ones first, one of each namespace in turn.

    A key is queued at most once. A key that is added while a worker has it is queued again afterwards, so no two
    workers have the same key. Each key has at most one requeue time: the last one set. A key that fails is requeued
    after its own back-off, which doubles with each failure.
    """

    def __init__(self, priority_of: Callable[[Key], Priority] = lambda _: Priority.PENDING) -> None:
        """`priority_of`: the present priority of a job."""
        self._priority_of = priority_of
        self._order = FairOrder()
        self._metrics = QueueMetrics()
        self._at_work: set[Key] = set()
        self._again: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._arrivals = {priority: asyncio.Event() for priority in Priority}
        """Each is set when a worker that waits for this priority may find a key."""
        self._closed = False

    def add(self, key: Key) -> None:
        """Queue the job now: something about it has changed."""
        if key in self._at_work:
            self._again.add(key)
            return
        if key not in self._order:
            self._metrics.queued(key)
        priority = self._priority_of(key)
        self._order.put(key, priority)
        self._report_depth()
        self._arrivals[Priority.PENDING].set()
        if priority is Priority.RUNNING:
            self._arrivals[Priority.RUNNING].set()

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
        self._metrics.retried()
        self.requeue(key, wait_seconds)
        return wait_seconds

    def succeeded(self, key: Key) -> None:
        """Reset the back-off of the job."""
        self._failures.pop(key, None)

    async def get(self, *, running_only: bool = False) -> Key | None:
        """Return the next key, which the caller has until `done`; None once the queue is closed.

        `running_only`: wait for a running job, even if pending ones wait.
        """
        arrival = self._arrivals[Priority.RUNNING if running_only else Priority.PENDING]
        while not self._closed:
            if taken := self._order.take(running_only=running_only):
                key, priority = taken
                self._at_work.add(key)
                self._metrics.begun(key, priority)
                self._report_depth()
                return key
            arrival.clear()
            await arrival.wait()
        return None

    def done(self, key: Key) -> None:
        """Give the key back."""
        self._at_work.discard(key)
        self._metrics.done(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def close(self) -> None:
        """Stop: `get` returns None from now on."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        for arrival in self._arrivals.values():
            arrival.set()

    def _report_depth(self) -> None:
        for priority in Priority:
            self._metrics.depth(priority, self._order.depth(priority))

    def _ring(self, key: Key) -> None:
        del self._timers[key]
        self.add(key)
