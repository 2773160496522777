"""Workers that observe, reconcile and apply, one job at a time each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime

import structlog
from structlog.contextvars import bound_contextvars

from rljob_operator.apply.executor import Executor, JobGone, MissingObject, NameTaken
from rljob_operator.apply.ownership import ForeignObject, LeftBehind
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
from rljob_operator.kube.watch import Key
from rljob_operator.metrics import RECONCILE_ERRORS, STATUS_WRITES_DELAYED
from rljob_operator.observation import Observation
from rljob_operator.observe.observer import Observer
from rljob_operator.reconcile.desired import BugReport, Desired, report_bug, report_unfinished
from rljob_operator.reconcile.observed import Observed
from rljob_operator.runtime.job_metrics import count
from rljob_operator.runtime.unfinished_reconciles import SLOW_SECONDS, UnfinishedReconciles
from rljob_operator.runtime.work_queue import WorkQueue
from rljob_operator.settings import OperatorSettings

_log = structlog.get_logger(__name__)

_RESERVED_SHARE = 4
"""One worker of so many takes running jobs only: pending ones, whose pods are created, keep a worker for long."""

Reconcile = Callable[[Observed, OperatorSettings, datetime], Desired]


class ReconcileLoop:
    """Reconciles queued jobs with `settings.reconcile_workers` workers; an error affects only its own job."""

    def __init__(
        self,
        settings: OperatorSettings,
        queue: WorkQueue,
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
        except Conflict as error:
            self._retry(key, "Conflict", error)
        except NameTaken as error:
            self._observer.refusals(key).name_taken(error.pod)
            self._retry(key, "Refused", error)
        except MissingObject as error:
            self._observer.refusals(key).missing_object = str(error)
            self._retry(key, "Refused", error)
        except ForeignObject as error:
            self._observer.refusals(key).foreign_object = str(error)
            self._retry(key, "Refused", error)
        except LeftBehind as error:
            self._observer.refusals(key).left_behind = str(error)
            self._retry(key, "Unavailable", error)
        except NotFound as error:
            self._observer.api_groups_outdated()
            self._observer.refusals(key).refused = error.message
            self._retry(key, "Refused", error)
        except NamespaceTerminating as error:
            self._observer.refusals(key).namespace_terminating = True
            self._retry(key, "Refused", error)
        except (Forbidden, Invalid, WebhookFailed) as error:
            self._observer.refusals(key).refused = error.message
            self._retry(key, "Refused", error)
        except ApiError as error:
            self._retry(key, "Unavailable", error)
        except Exception as error:
            _log.exception("reconcile failed; this is a bug in the operator")
            self._retry(key, "Unexpected", error)
            await self._report(key, report_bug(error))

    async def _observe_and_execute(self, key: Key) -> None:
        observation = self._observer.observe(key)
        if observation is None:
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
            observation, desired = await self._decide(key, observation)
            if desired.status is not None:
                self._observer.status_written(key)
            STATUS_WRITES_DELAYED.inc(desired.is_status_delayed)
            if desired.verify:
                self._observer.objects_checked(key, failed=True)  # until it has succeeded
            await self._executor.execute(desired, observation)
            if desired.verify:
                self._observer.objects_checked(key)
            if desired.apply or desired.create or desired.verify:
                self._observer.accepted(key)
            count(observation.status, desired.status)
            self._queue.requeue(key, desired.requeue_after_seconds)
        self._queue.succeeded(key)

    async def _decide(self, key: Key, observation: Observation) -> tuple[Observation, Desired]:
        """Reconcile in a thread, so that the Lease is renewed and the probes are answered meanwhile, however long it
        takes. One that takes long, or did not return in an earlier process, is recorded."""
        must_wait = self._deciding.locked()
        async with self._deciding:
            if must_wait:
                observation = self._observer.observe(key) or observation
            if self._unfinished.deaths(key):
                await self._unfinished.begin(key)
            began = time.monotonic()
            decision = asyncio.get_running_loop().run_in_executor(None, self._decided, observation)
            try:
                done, _ = await asyncio.wait((decision,), timeout=SLOW_SECONDS)
                if not done:
                    await self._unfinished.begin(key)
                return observation, await decision
            finally:
                await self._unfinished.end(key)
                if (seconds := time.monotonic() - began) >= SLOW_SECONDS:
                    _log.warning("slow reconcile", seconds=round(seconds, 1))

    def _decided(self, observation: Observation) -> Desired:
        return self._reconcile(observation.observed, self._settings, datetime.now(UTC))

    def _seconds_to_wait(self, key: Key) -> float:
        """Time that a job has to wait because processes have ended over it; a deleted one has its finalizer removed."""
        fact = self._observer.jobs.get(key)
        return 0.0 if fact is None or fact.deleting else self._unfinished.seconds_left(key)

    async def _report(self, key: Key, report: BugReport) -> None:
        """Write the report into the status of the job, where its owner can see it. Best effort."""
        try:
            observation = self._observer.observe_metadata(key)
            if observation and observation.observed.operator in ("", self._settings.installation):
                await self._executor.report(report, observation)
        except LeadershipLost:
            raise
        except Exception as error:
            _log.warning("cannot report the error in the status of the job", error=str(error) or type(error).__name__)

    def _retry(self, key: Key, cause: str, error: Exception) -> None:
        RECONCILE_ERRORS.labels(cause).inc()
        wait_seconds = self._queue.failed(key)
        _log.info("will retry", cause=cause, error=str(error), after_seconds=round(wait_seconds, 2))
