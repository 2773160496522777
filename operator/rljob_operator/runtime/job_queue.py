"""The queue of jobs to reconcile, with back-off and requeue times."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from enum import StrEnum
from functools import partial

from rljob_operator.kube.watch import Key
from rljob_operator.metrics import counter, gauge, histogram

_FIRST_BACKOFF_SECONDS = 0.25
_LONGEST_BACKOFF_SECONDS = 60.0


class JobQueue:
    """Keys of jobs: running ones first, one of each namespace in turn.

    A key is queued at most once. A key that is added while a worker has it is queued again afterwards, so no two
    workers have the same key. Each key has at most one requeue time: the last one set. A key that fails is requeued
    after its own back-off, which doubles with each failure.
    """

    def __init__(self, is_running: Callable[[Key], bool] = lambda _: False) -> None:
        """`is_running`: the job holds nodes, or recovers from a failure."""
        self._is_running = is_running
        self._order = FairOrder()
        self._queued_at: dict[Key, float] = {}
        self._begun_at: dict[Key, float] = {}
        """Keys that workers have."""
        self._again: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._arrivals = {priority: asyncio.Event() for priority in Priority}
        """Each is set when a worker that waits for this priority may find a key."""
        self._closed = False
        _UNFINISHED.set_function(lambda: sum(self._running_seconds()))
        _LONGEST_RUNNING.set_function(lambda: max(self._running_seconds(), default=0.0))

    def add(self, key: Key) -> None:
        """Queue the job now: something about it has changed."""
        if key in self._begun_at:
            self._again.add(key)
            return
        if key not in self._order:
            _ADDS.inc()
            self._queued_at[key] = time.monotonic()
        priority = Priority.RUNNING if self._is_running(key) else Priority.PENDING
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
        _RETRIES.inc()
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
                now = self._begun_at[key] = time.monotonic()
                _QUEUE_DURATION[priority].observe(now - self._queued_at.pop(key, now))
                self._report_depth()
                return key
            arrival.clear()
            await arrival.wait()
        return None

    def done(self, key: Key) -> None:
        """Give the key back."""
        _WORK_DURATION.observe(time.monotonic() - self._begun_at.pop(key))
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
            _DEPTH[priority].set(self._order.depth(priority))

    def _running_seconds(self) -> list[float]:
        now = time.monotonic()
        return [now - begun for begun in self._begun_at.values()]

    def _ring(self, key: Key) -> None:
        del self._timers[key]
        self.add(key)


# --- Order ---


_URGENT_IN_A_ROW = 9
"""Running jobs that are taken one after the other while pending ones wait. A tenant whose running jobs report without
pause would otherwise keep all pending jobs waiting."""


class Priority(StrEnum):
    """Urgency of a job; the values are labels of metrics."""

    RUNNING = "running"
    """Its pods hold nodes, or it recovers from a failure."""
    PENDING = "pending"
    """It holds no nodes: it waits for pods, is suspended or has finished."""


class FairOrder:
    """Waiting keys, each once: one of each namespace in turn, and first in, first out within a namespace.

    All operations take constant time.
    """

    def __init__(self) -> None:
        self._priorities: dict[Key, Priority] = {}
        self._names: dict[Priority, OrderedDict[str, OrderedDict[str, None]]] = {p: OrderedDict() for p in Priority}
        """Names of the waiting jobs by priority and namespace."""
        self._depths = Counter[Priority]()
        self._urgent_taken = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._priorities

    def __len__(self) -> int:
        return len(self._priorities)

    def depth(self, priority: Priority) -> int:
        return self._depths[priority]

    def put(self, key: Key, priority: Priority) -> None:
        """Add the key. One that waits already keeps its place, or gets one among running jobs if it runs by now."""
        before = self._priorities.get(key)
        if before in (priority, Priority.RUNNING):
            return
        if before is not None:
            self._remove(key)
        namespace, name = key
        self._priorities[key] = priority
        self._names[priority].setdefault(namespace, OrderedDict())[name] = None
        self._depths[priority] += 1

    def take(self, *, running_only: bool = False) -> tuple[Key, Priority] | None:
        """The next key and the priority that it had; None if none waits."""
        pending, running = self._depths[Priority.PENDING], self._depths[Priority.RUNNING]
        turn_of_pending = self._urgent_taken >= _URGENT_IN_A_ROW and pending
        if running and (running_only or not turn_of_pending):
            self._urgent_taken += 1
            priority = Priority.RUNNING
        elif pending and not running_only:
            self._urgent_taken = 0
            priority = Priority.PENDING
        else:
            return None
        namespace, names = next(iter(self._names[priority].items()))
        self._names[priority].move_to_end(namespace)
        key = namespace, next(iter(names))
        self._remove(key)
        return key, priority

    def _remove(self, key: Key) -> None:
        namespace, name = key
        priority = self._priorities.pop(key)
        names = self._names[priority]
        del names[namespace][name]
        if not names[namespace]:
            del names[namespace]
        self._depths[priority] -= 1


# --- Metrics, with the names of client-go's work queues ---


_LABELS = {"name": "rljob", "controller": "rljob"}
_BUCKETS = (1e-6, 1e-5, 1e-4, 1e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900)

_counter, _gauge = partial(counter, labelnames=tuple(_LABELS)), partial(gauge, labelnames=tuple(_LABELS))
_histogram = partial(histogram, labelnames=tuple(_LABELS), buckets=_BUCKETS)
_PRIORITY_LABELS = (*_LABELS, "priority")

_depth = _gauge("workqueue_depth", "Jobs that wait for a reconcile.", labelnames=_PRIORITY_LABELS)
_DEPTH = {priority: _depth.labels(**_LABELS, priority=priority) for priority in Priority}
_ADDS = _counter("workqueue_adds", "Jobs that were queued.").labels(**_LABELS)
_RETRIES = _counter("workqueue_retries", "Reconciles that failed and are repeated.").labels(**_LABELS)
_queue_duration = _histogram(
    "workqueue_queue_duration_seconds", "Seconds that a job waited in the queue.", labelnames=_PRIORITY_LABELS
)
_QUEUE_DURATION = {priority: _queue_duration.labels(**_LABELS, priority=priority) for priority in Priority}
_WORK_DURATION = _histogram(
    "workqueue_work_duration_seconds", "Duration of one reconcile of one job, including its writes."
).labels(**_LABELS)
_UNFINISHED = _gauge("workqueue_unfinished_work_seconds", "Sum of the durations of all reconciles in progress.").labels(
    **_LABELS
)
_LONGEST_RUNNING = _gauge(
    "workqueue_longest_running_processor_seconds", "Duration of the longest reconcile in progress."
).labels(**_LABELS)
