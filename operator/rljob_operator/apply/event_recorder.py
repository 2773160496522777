"""Kubernetes Events: best effort, repeated ones counted in a series, and rate-limited."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeVar

import structlog

from rljob_operator.events import EventNote, Subject
from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.errors import ApiError, NotFound
from rljob_operator.kube.resources import EVENTS, RLJOBS, Object, micro_time
from rljob_operator.metrics import EVENTS_DROPPED
from rljob_operator.reconcile.observed import ObservedJob
from rljob_operator.token_bucket import TokenBucket

_log = structlog.get_logger(__name__)

Name = TypeVar("Name")
Value = TypeVar("Value")

REPORTING_CONTROLLER = "rljob.dev/operator"

_MAX_NOTE_BYTES = 1024
"""Limit of the API server, in bytes of UTF-8."""
_MAX_WAITING = 1000
"""Events that wait to be sent. More are dropped."""
_MAX_SERIES_KNOWN = 4096
_SERIES_ENDS_AFTER_SECONDS = 360.0
"""Time after which a repetition is a new Event, as in client-go."""
_BURST = 25
_SECONDS_PER_TOKEN = 300.0
"""Rate of client-go: 25 Events of an object at once, then one every five minutes."""


@dataclass(slots=True)
class _Series:
    event: str
    count: int
    seen_at: float


class EventRecorder:
    """Queues notes and writes them as Events in the background. `instance` names this process, usually its pod."""

    def __init__(self, client: ApiClient, instance: str) -> None:
        self._client = client
        self._instance = instance
        self._waiting: asyncio.Queue[tuple[Subject, EventNote]] = asyncio.Queue(_MAX_WAITING)
        self._series: OrderedDict[str, _Series] = OrderedDict()
        self._tokens: OrderedDict[str, TokenBucket] = OrderedDict()

    def record(self, job: ObservedJob, note: EventNote) -> None:
        """Queue a note about a job. Never waits and never fails: notes beyond the limits are dropped and counted."""
        self.record_about(Subject(RLJOBS.api_version, RLJOBS.kind, job.namespace, job.name, job.uid), note)

    def record_about(self, subject: Subject, note: EventNote) -> None:
        """Queue a note about any object, as `record`."""
        try:
            self._waiting.put_nowait((subject, note))
        except asyncio.QueueFull:
            EVENTS_DROPPED.inc()

    async def run(self) -> None:
        """Write Events until cancelled."""
        while True:
            subject, note = await self._waiting.get()
            try:
                await self._write(subject, note)
            except ApiError as error:
                EVENTS_DROPPED.inc()
                _log.warning("event not recorded", job=subject.name, namespace=subject.namespace, error=error.message)
            finally:
                self._waiting.task_done()

    async def flush(self) -> None:
        """Return when all notes are written or dropped."""
        await self._waiting.join()

    async def create(self, name: str, subject: Subject, note: EventNote) -> None:
        """Write an Event of this name at once, outside the limits. Raises AlreadyExists and the other ApiErrors."""
        await self._client.create(EVENTS, self._event(name, subject, note), subject.namespace)

    async def _write(self, subject: Subject, note: EventNote) -> None:
        now = time.monotonic()
        key = hashlib.sha256("\0".join((subject.uid, note.type, note.reason, note.message)).encode()).hexdigest()
        series = self._series.get(key)
        tokens = remembered(self._tokens, subject.uid, TokenBucket(_BURST, _SECONDS_PER_TOKEN))
        if tokens.seconds_left(now):
            EVENTS_DROPPED.inc()
            return
        tokens.take(now)
        if series and now - series.seen_at < _SERIES_ENDS_AFTER_SECONDS:
            series.count, series.seen_at = series.count + 1, now
            repeated = {"series": {"count": series.count, "lastObservedTime": micro_time()}}
            try:
                await self._client.patch(EVENTS, series.event, repeated, subject.namespace)
                return
            except NotFound:
                del self._series[key]
        event = f"{subject.name}.{time.time_ns():x}"
        await self.create(event, subject, note)
        self._series.pop(key, None)
        remembered(self._series, key, _Series(event, 1, now))

    def _event(self, name: str, subject: Subject, note: EventNote) -> Object:
        return {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"name": name, "namespace": subject.namespace},
            "eventTime": micro_time(),
            "type": note.type,
            "reason": note.reason,
            "action": "Reconcile",
            "note": _clipped(note.message),
            "reportingController": REPORTING_CONTROLLER,
            "reportingInstance": self._instance,
            "regarding": {
                "apiVersion": subject.api_version,
                "kind": subject.kind,
                "namespace": subject.namespace,
                "name": subject.name,
                "uid": subject.uid,
            },
        }


def remembered(known: OrderedDict[Name, Value], key: Name, fresh: Value, at_most: int = _MAX_SERIES_KNOWN) -> Value:
    """The value of `key`, `fresh` if it has none. Drops the value that was used longest ago, beyond `at_most`."""
    value = known.setdefault(key, fresh)
    known.move_to_end(key)
    if len(known) > at_most:
        known.popitem(last=False)
    return value


def _clipped(message: str) -> str:
    encoded, dots = message.encode(), "…"
    if len(encoded) <= _MAX_NOTE_BYTES:
        return message
    return encoded[: _MAX_NOTE_BYTES - len(dots.encode())].decode(errors="ignore") + dots
