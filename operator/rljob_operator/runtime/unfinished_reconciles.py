"""Jobs whose reconcile takes long, recorded outside the process: if it dies, its successor reconciles them last."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Container

import structlog

from rljob_operator.kube.watch import Key

ANNOTATION = "rljob.dev/unfinished-reconciles"
"""Annotation of the Lease: for each job, the number of processes that did not finish its reconcile."""

SLOW_SECONDS = 1.0
"""Duration from which a reconcile is recorded and logged. Almost all take milliseconds, and cost no write."""

_FIRST_WAIT_SECONDS = 30.0
_LONGEST_WAIT_SECONDS = 600.0
_MAX_JOBS = 100
"""Jobs in the annotation, of which an object may have 256 KiB."""

_log = structlog.get_logger(__name__)

Record = Callable[[str], Awaitable[None]]
"""Stores the text, where the next process finds it."""


async def _no_record(_: str) -> None:
    pass


class UnfinishedReconciles:
    """The record, and the times until which its jobs wait. Without leader election there is none."""

    def __init__(self, recorded: str = "", record: Record = _no_record) -> None:
        """`recorded`: the text of the process before; one of another form counts as empty."""
        self._record = record
        self._deaths = _parsed(recorded)
        now = time.monotonic()
        self._due = {key: now + wait_seconds(deaths) for key, deaths in self._deaths.items()}
        self._running: set[Key] = set()
        """Jobs with a recorded reconcile that runs now."""

    def deaths(self, key: Key) -> int:
        """Processes that ended while they reconciled the job."""
        return self._deaths.get(key, 0)

    def seconds_left(self, key: Key) -> float:
        """Time until the job may be reconciled again."""
        return max(0.0, self._due.get(key, 0.0) - time.monotonic())

    async def begin(self, key: Key) -> None:
        """Record that the job is being reconciled. Called at once for a job of the record, later for all others."""
        if len(self._deaths) < _MAX_JOBS or key in self._deaths:
            self._running.add(key)
            await self._write()

    async def end(self, key: Key) -> None:
        """Remove the job from the record: its reconcile has returned, or the job is gone."""
        if key in self._running or key in self._deaths:
            self._running.discard(key)
            self._deaths.pop(key, None)
            self._due.pop(key, None)
            await self._write()

    async def keep_only(self, jobs: Container[Key]) -> None:
        """Remove jobs that do not exist any more."""
        for key in [key for key in self._deaths if key not in jobs]:
            await self.end(key)

    async def _write(self) -> None:
        counts = {key: self._deaths.get(key, 0) + (key in self._running) for key in {*self._deaths, *self._running}}
        await self._record(json.dumps({"/".join(key): count for key, count in sorted(counts.items())}))


def wait_seconds(deaths: int) -> float:
    """Time from the start of the process to the next attempt. Doubles with each process that ended."""
    return min(_FIRST_WAIT_SECONDS * 2.0 ** min(deaths - 1, 16), _LONGEST_WAIT_SECONDS)


def _parsed(text: str) -> dict[Key, int]:
    try:
        counts = {tuple(key.split("/")): int(count) for key, count in json.loads(text or "{}").items()}
        return {(namespace, name): max(count, 1) for (namespace, name), count in counts.items()}
    except (ValueError, TypeError, AttributeError) as error:
        _log.warning("record of unfinished reconciles ignored", annotation=ANNOTATION, error=str(error))
        return {}
