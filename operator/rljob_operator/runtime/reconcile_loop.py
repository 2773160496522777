"""Workers that observe, reconcile and apply, one job at a time each."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Container
from datetime import UTC, datetime

import structlog
from structlog.contextvars import bound_contextvars

from rljob_api.plan_change import DiagnosisStatus, PlanChange
from rljob_api.status import RLJobStatus
from rljob_memory.diagnosis import FailureClass
from rljob_memory.recovery import CHANGEABLE_SETTINGS
from rljob_operator.apply.executor import Executor, JobGone
from rljob_operator.apply.object_writer import ForeignObject, LeftBehind, MissingObject, NameTaken
from rljob_operator.events import EventNote
from rljob_operator.kube.errors import (
    ApiError,
    Conflict,
    Forbidden,
    Invalid,
    NamespaceGone,
    NamespaceTerminating,
    NotFound,
    WebhookFailed,
)
from rljob_operator.kube.lease import LeadershipLost
from rljob_operator.kube.resources import Object
from rljob_operator.kube.watch import Key
from rljob_operator.metrics import (
    ADJUSTMENTS,
    JOB_RESTARTS,
    JOBS_FINISHED,
    OUT_OF_MEMORY,
    RECONCILE_ERRORS,
    SECONDS_TO_RECOVER,
    STATUS_WRITES_DELAYED,
)
from rljob_operator.observe.observer import Observer
from rljob_operator.reconcile.desired import Desired, report_bug, report_unfinished
from rljob_operator.reconcile.observed import ObservedJob
from rljob_operator.runtime.job_queue import JobQueue
from rljob_operator.settings import OperatorSettings

_log = structlog.get_logger(__name__)

_RESERVED_SHARE = 4
"""One worker in this number takes running jobs only: pending ones, whose pods are created, keep a worker for long."""

Reconcile = Callable[[ObservedJob, OperatorSettings, datetime], Desired]


class ReconcileLoop:
    """Reconciles queued jobs with `settings.reconcile_workers` workers; an error affects only its own job."""

    def __init__(
        self,
        settings: OperatorSettings,
        queue: JobQueue,
        observer: Observer,
        executor: Executor,
        reconcile: Reconcile,
        unfinished: UnfinishedReconciles | None = None,
    ) -> None:
        self._settings = settings
        self._queue = queue
        self._observer = observer
        self._executor = executor
        self._reconcile = reconcile
        self._unfinished = unfinished or UnfinishedReconciles()
        self._deciding = asyncio.Lock()
        """Held by the reconcile in progress: threads share one interpreter, so several at once would only delay the
        event loop."""

    async def run(self) -> None:
        """Return when the queue is closed and the workers have finished. Raises LeadershipLost."""
        reserved = self._settings.reconcile_workers // _RESERVED_SHARE
        async with asyncio.TaskGroup() as workers:
            for number in range(self._settings.reconcile_workers):
                workers.create_task(self._work(running_only=number < reserved))

    async def _work(self, *, running_only: bool) -> None:
        while (key := await self._queue.get(running_only=running_only)) is not None:
            namespace, name = key
            try:
                with bound_contextvars(namespace=namespace, job=name):
                    await self._reconcile_once(key)
            finally:
                self._queue.done(key)

    async def _reconcile_once(self, key: Key) -> None:
        """Reconcile one job once, and requeue it according to the result."""
        try:
            await self._observe_and_execute(key)
        except LeadershipLost:
            raise
        except (JobGone, NamespaceGone):
            self._observer.jobs.forget(key)
        except Exception as error:
            cause = self._cause_of(error, key)
            RECONCILE_ERRORS.labels(cause).inc()
            wait_seconds = self._queue.failed(key)
            _log.info("will retry", cause=cause, error=str(error), after_seconds=round(wait_seconds, 2))
            if cause == "Unexpected":
                _log.exception("reconcile failed; this is a bug in the operator")
                await self._report(key, report_bug(error))

    def _cause_of(self, error: Exception, key: Key) -> str:
        """The cause in the metric. A refusal is recorded, so that the next reconcile explains it in the status."""
        refusals = self._observer.refusals(key)
        match error:
            case Conflict():
                return "Conflict"
            case LeftBehind():
                refusals.left_behind = str(error)
                return "Unavailable"
            case NameTaken():
                refusals.name_taken(error.pod)
            case MissingObject():
                refusals.missing_object = str(error)
            case ForeignObject():
                refusals.foreign_object = str(error)
            case NamespaceTerminating():
                refusals.namespace_terminating = True
            case NotFound():
                self._observer.api_groups_outdated()
                refusals.refused = error.message
            case Forbidden() | Invalid() | WebhookFailed():
                refusals.refused = error.message
            case ApiError():
                return "Unavailable"
            case _:
                return "Unexpected"
        return "Refused"

    async def _observe_and_execute(self, key: Key) -> None:
        observe = self._observer.observe(key)
        if observe is None:
            self._executor.forget(key)
            await self._unfinished.end(key)
            for workload in self._observer.orphaned_workloads(key):
                await self._executor.delete_workload(workload, key[0])
            self._queue.requeue(key, None)
        elif wait_seconds := self._seconds_to_wait(key):
            self._queue.requeue(key, wait_seconds)
            await self._report(key, report_unfinished(self._unfinished.deaths(key)))
            return
        else:
            observed, desired = await self._decide(key, observe)
            if desired.status is not None:
                self._observer.status_written(key)
            STATUS_WRITES_DELAYED.inc(desired.is_status_delayed)
            if desired.verify:
                self._observer.objects_checked(key, failed=True)  # until it has succeeded
            await self._executor.execute(desired, observed)
            if desired.verify:
                self._observer.objects_checked(key)
            if desired.apply or desired.create or desired.verify:
                self._observer.accepted(key)
            count(observed.raw_status, desired.status)
            self._queue.requeue(key, desired.requeue_after_seconds)
        self._queue.succeeded(key)

    async def _decide(self, key: Key, observe: Callable[[], ObservedJob]) -> tuple[ObservedJob, Desired]:
        """Observe and reconcile in a thread, so that the Lease is renewed and the probes are answered, however long it
        takes. One that takes long, or did not return in an earlier process, is recorded."""
        must_wait = self._deciding.locked()
        async with self._deciding:
            if must_wait:
                observe = self._observer.observe(key) or observe
            if self._unfinished.deaths(key):
                await self._unfinished.begin(key)
            began = time.monotonic()
            decision = asyncio.get_running_loop().run_in_executor(None, self._decided, observe)
            try:
                done, _ = await asyncio.wait((decision,), timeout=SLOW_SECONDS)
                if not done:
                    await self._unfinished.begin(key)
                return await decision
            finally:
                await self._unfinished.end(key)
                if (seconds := time.monotonic() - began) >= SLOW_SECONDS:
                    _log.warning("slow reconcile", seconds=round(seconds, 1))

    def _decided(self, observe: Callable[[], ObservedJob]) -> tuple[ObservedJob, Desired]:
        observed = observe()
        return observed, self._reconcile(observed, self._settings, datetime.now(UTC))

    def _seconds_to_wait(self, key: Key) -> float:
        """Time that a job has to wait because processes have ended over it; a deleted one has its finalizer removed."""
        fact = self._observer.jobs.get(key)
        return 0.0 if fact is None or fact.deleting else self._unfinished.seconds_left(key)

    async def _report(self, key: Key, report: EventNote) -> None:
        """Write the report into the status of the job, where its owner can see it. Best effort."""
        try:
            observed = self._observer.observe_metadata(key)
            if observed is None or observed.delegated:
                return
            if observed.operator in ("", self._settings.installation):
                await self._executor.report(report, observed)
        except LeadershipLost:
            raise
        except Exception as error:
            _log.warning("cannot report the error in the status of the job", error=str(error) or type(error).__name__)


# --- Reconciles that do not return ---


ANNOTATION = "rljob.dev/unfinished-reconciles"
"""Annotation of the Lease: for each job, the number of processes that did not finish its reconcile."""

SLOW_SECONDS = 1.0
"""Duration from which a reconcile is recorded and logged. Almost all take milliseconds, and cost no write."""

_FIRST_WAIT_SECONDS = 30.0
_LONGEST_WAIT_SECONDS = 600.0
_MAX_JOBS = 100
"""Jobs in the annotation. All annotations of an object have at most 256 KiB."""


class UnfinishedReconciles:
    """The record, and the times until which its jobs wait."""

    def __init__(self, recorded: str = "", record: Callable[[str], Awaitable[None]] | None = None) -> None:
        """`recorded`: the text of the process before; one of another form counts as empty.

        `record` stores the text for the next process; None without leader election.
        """
        self._record = record
        self._deaths = _parsed(recorded)
        self._started_at = time.monotonic()
        self._running: set[Key] = set()
        """Jobs with a recorded reconcile that runs now."""

    def deaths(self, key: Key) -> int:
        """Processes that ended while they reconciled the job."""
        return self._deaths.get(key, 0)

    def seconds_left(self, key: Key) -> float:
        """Time until the job may be reconciled again."""
        deaths = self.deaths(key)
        return max(0.0, self._started_at + wait_seconds(deaths) - time.monotonic()) if deaths else 0.0

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
            await self._write()

    async def keep_only(self, jobs: Container[Key]) -> None:
        """Remove jobs that do not exist any more."""
        for key in [key for key in self._deaths if key not in jobs]:
            await self.end(key)

    async def _write(self) -> None:
        if self._record is None:
            return
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


# --- Counters of outcomes ---


def count(before: Object, written: RLJobStatus | None) -> None:
    """Count the changes from status `before` (as stored) to `written`; None if no status was written."""
    if written is None:
        return
    restarts = written.restarts - int(before.get("restarts") or 0)
    if restarts > 0:
        JOB_RESTARTS.inc(restarts)
    phase = written.display.phase if written.display else ""
    if phase in ("Complete", "Failed") and phase != (before.get("display") or {}).get("phase"):
        JOBS_FINISHED.labels(phase).inc()
    known = {change["generation"]: change for change in before.get("planChanges") or ()}
    for change in written.plan_changes:
        _count_change(known.get(change.generation), change)
    if set(known) >= {change.generation for change in written.plan_changes}:
        _count_failure_without_change(before, written)


def _count_change(before: Object | None, change: PlanChange) -> None:
    if before is None:
        # Pods report any name, and the operator keeps each label as long as it runs.
        ADJUSTMENTS.labels(change.remedy.setting if change.remedy.setting in CHANGEABLE_SETTINGS else "other").inc()
        if not change.preventive:
            OUT_OF_MEMORY.labels(_class_of(change.diagnosis)).inc()
    if change.seconds_to_recover is not None and (before is None or before.get("secondsToRecover") is None):
        SECONDS_TO_RECOVER.observe(change.seconds_to_recover)


def _count_failure_without_change(before: Object, written: RLJobStatus) -> None:
    """Count an out-of-memory failure after which the plan was not changed."""
    latest = written.last_out_of_memory
    if latest and latest.model_dump(mode="json", by_alias=True, exclude_none=True) != before.get("lastOutOfMemory"):
        OUT_OF_MEMORY.labels(_class_of(latest.diagnosis)).inc()


def _class_of(diagnosis: DiagnosisStatus) -> str:
    return diagnosis.class_name if diagnosis.class_name in set(FailureClass) else str(FailureClass.UNKNOWN)
