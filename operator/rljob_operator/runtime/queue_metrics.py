"""Metrics of the work queue, with the names, labels and buckets of client-go and controller-runtime."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import Counter, Gauge, Histogram

from rljob_operator.kube.watch import Key
from rljob_operator.metrics import REGISTRY
from rljob_operator.runtime.fair_order import Priority

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
