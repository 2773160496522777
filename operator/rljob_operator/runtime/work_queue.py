"""The queue of jobs to reconcile, with back-off and requeue times."""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict
from collections.abc import Callable
from enum import StrEnum

from prometheus_client import Counter, Gauge, Histogram

from rljob_operator.kube.watch import Key
from rljob_operator.metrics import REGISTRY

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
    """Waiting keys, each once. All operations take constant time."""

    def __init__(self) -> None:
        self._priorities: dict[Key, Priority] = {}
        self._waiting = {priority: _RoundRobin() for priority in Priority}
        self._urgent_taken = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._priorities

    def __len__(self) -> int:
        return len(self._priorities)

    def depth(self, priority: Priority) -> int:
        return self._waiting[priority].size

    def put(self, key: Key, priority: Priority) -> None:
        """Add the key. One that waits already keeps its place, or gets one among running jobs if it runs by now."""
        before = self._priorities.get(key)
        if before in (priority, Priority.RUNNING):
            return
        if before is not None:
            self._waiting[before].remove(key)
        self._priorities[key] = priority
        self._waiting[priority].append(key)

    def take(self, *, running_only: bool = False) -> tuple[Key, Priority] | None:
        """The next key and the priority that it had; None if none waits."""
        pending, running = self._waiting[Priority.PENDING], self._waiting[Priority.RUNNING]
        turn_of_pending = self._urgent_taken >= _URGENT_IN_A_ROW and pending.size
        if running.size and (running_only or not turn_of_pending):
            self._urgent_taken += 1
            key, priority = running.popleft(), Priority.RUNNING
        elif pending.size and not running_only:
            self._urgent_taken = 0
            key, priority = pending.popleft(), Priority.PENDING
        else:
            return None
        del self._priorities[key]
        return key, priority


class _RoundRobin:
    """Keys, one of each namespace in turn; first in, first out within a namespace."""

    def __init__(self) -> None:
        self.size = 0
        self._namespaces: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()

    def append(self, key: Key) -> None:
        namespace, name = key
        self._namespaces.setdefault(namespace, OrderedDict())[name] = None
        self.size += 1

    def popleft(self) -> Key:
        namespace, names = self._namespaces.popitem(last=False)
        name, _ = names.popitem(last=False)
        if names:
            self._namespaces[namespace] = names  # behind the others
        self.size -= 1
        return namespace, name

    def remove(self, key: Key) -> None:
        namespace, name = key
        del self._namespaces[namespace][name]
        if not self._namespaces[namespace]:
            del self._namespaces[namespace]
        self.size -= 1


# --- Metrics ---


QUEUE = "rljob"
"""Value of the labels `name` and `controller`."""
_LABELS = ("name", "controller")
_BUCKETS = (1e-6, 1e-5, 1e-4, 1e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900)

_DEPTH = Gauge("workqueue_depth", "Jobs that wait for a reconcile.", (*_LABELS, "priority"), registry=REGISTRY)
_ADDS = Counter("workqueue_adds", "Jobs that were queued.", _LABELS, registry=REGISTRY)
_QUEUE_DURATION = Histogram(
    "workqueue_queue_duration_seconds",
    "Seconds that a job waited in the queue.",
    (*_LABELS, "priority"),
    buckets=_BUCKETS,
    registry=REGISTRY,
)
_WORK_DURATION = Histogram(
    "workqueue_work_duration_seconds",
    "Duration of one reconcile of one job, including its writes.",
    _LABELS,
    buckets=_BUCKETS,
    registry=REGISTRY,
)
_RETRIES = Counter("workqueue_retries", "Reconciles that failed and are repeated.", _LABELS, registry=REGISTRY)
_UNFINISHED = Gauge(
    "workqueue_unfinished_work_seconds",
    "Sum of the durations of all reconciles in progress.",
    _LABELS,
    registry=REGISTRY,
)
_LONGEST_RUNNING = Gauge(
    "workqueue_longest_running_processor_seconds",
    "Duration of the longest reconcile in progress.",
    _LABELS,
    registry=REGISTRY,
)


class QueueMetrics:
    """Records one queue. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._queued_at: dict[Key, float] = {}
        self._begun_at: dict[Key, float] = {}
        self._depths = {priority: _DEPTH.labels(QUEUE, QUEUE, priority) for priority in Priority}
        self._waits = {priority: _QUEUE_DURATION.labels(QUEUE, QUEUE, priority) for priority in Priority}
        self._adds, self._retries = _ADDS.labels(QUEUE, QUEUE), _RETRIES.labels(QUEUE, QUEUE)
        self._work = _WORK_DURATION.labels(QUEUE, QUEUE)
        _UNFINISHED.labels(QUEUE, QUEUE).set_function(self._unfinished_seconds)
        _LONGEST_RUNNING.labels(QUEUE, QUEUE).set_function(self._longest_running_seconds)

    def queued(self, key: Key) -> None:
        self._adds.inc()
        self._queued_at[key] = self._clock()

    def begun(self, key: Key, priority: Priority) -> None:
        now = self._clock()
        self._waits[priority].observe(now - self._queued_at.pop(key, now))
        self._begun_at[key] = now

    def done(self, key: Key) -> None:
        now = self._clock()
        self._work.observe(now - self._begun_at.pop(key, now))

    def retried(self) -> None:
        self._retries.inc()

    def depth(self, priority: Priority, waiting: int) -> None:
        self._depths[priority].set(waiting)

    def _unfinished_seconds(self) -> float:
        now = self._clock()
        return sum(now - begun for begun in self._begun_at.values())

    def _longest_running_seconds(self) -> float:
        return self._clock() - min(self._begun_at.values()) if self._begun_at else 0.0
