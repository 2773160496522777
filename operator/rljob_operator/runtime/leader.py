"""The leading replica: fills the caches, reconciles jobs, and hands over."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import kopf
import structlog

from rljob_operator.apply.event_recorder import EventRecorder
from rljob_operator.apply.executor import Executor
from rljob_operator.apply.node_labels import NodeLabels
from rljob_operator.diagnose.labelled_pods import SELECTOR, LabelledPods
from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.connection import Connection
from rljob_operator.kube.errors import ApiError, RetryPolicy
from rljob_operator.kube.lease import LeaderElection, LeadershipLost
from rljob_operator.kube.resources import PODS, workloads_served
from rljob_operator.kube.watch import Key, Reflector
from rljob_operator.metrics import LEADER
from rljob_operator.observe.node_facts import NodeFact
from rljob_operator.observe.observer import Observer
from rljob_operator.observe.watches import Attendance, reflectors
from rljob_operator.runtime.endpoints import Health
from rljob_operator.runtime.reconcile_loop import ANNOTATION, Reconcile, ReconcileLoop, UnfinishedReconciles
from rljob_operator.runtime.work_queue import Priority, WorkQueue
from rljob_operator.settings import OperatorSettings

EXIT_LEADERSHIP_LOST = 3

_log = structlog.get_logger(__name__)

_API_GROUPS_READ_EVERY_SECONDS = 600.0
_API_GROUPS_READ_AT_MOST_EVERY_SECONDS = 1.0
_STOP_WITHIN_SECONDS = 20.0
_EVENTS_WRITTEN_WITHIN_SECONDS = 2.0


class Leader:
    """The leading replica. `identity` is its name in Events."""

    def __init__(
        self,
        settings: OperatorSettings,
        connection: Connection,
        election: LeaderElection | None,
        health: Health,
        reconcile: Reconcile,
        identity: str,
    ) -> None:
        self._settings = settings
        self._connection = connection
        self._election = election
        self._health = health
        guard = election.guard if election else None
        self._client = ApiClient(connection, concurrency=settings.api_concurrency, guard=guard)
        watches = 1 + 4 * max(1, len(settings.namespaces))  # each keeps a connection
        self._watch_client = ApiClient(connection, concurrency=watches + 2)
        self._event_client = ApiClient(connection, concurrency=1, retry=RetryPolicy(attempts=2), guard=guard)
        self._diagnosis_client = ApiClient(connection, concurrency=1, retry=RetryPolicy(attempts=2), guard=guard)
        self._queue = WorkQueue(self._priority_of)
        self._observer = Observer(settings.gpu_resources, self._wake)
        self._attendance = Attendance((), self._wake_all)
        self._identity = identity
        self._recorder = EventRecorder(self._event_client, instance=identity)
        self._node_labels = NodeLabels(self._client)
        self._executor = Executor(self._client, self._recorder, self._observer.saw)
        self._unfinished = _unfinished_reconciles(election)
        self._loop = ReconcileLoop(settings, self._queue, self._observer, self._executor, reconcile, self._unfinished)
        self._tasks: list[asyncio.Task[None]] = []
        self._reconciling: asyncio.Task[None] | None = None
        self._api_groups_read = asyncio.Event()
        self._api_groups_outdated = asyncio.Event()
        self._observer.api_groups_outdated = self._api_groups_outdated.set
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None

    async def lead(self) -> None:
        """Lead until a signal. Raises the error that stopped it."""
        try:
            await run_in_kopf(self._connection, start=self._begin, stop=self._hand_over, stop_flag=self._stop)
        finally:
            await self._hand_over()
        if self._failure:
            raise self._failure

    def _begin(self) -> None:
        LEADER.set(1)
        watches = reflectors(
            self._watch_client, self._observer, self._settings.namespaces, watch_nodes=self._settings.watch_nodes
        )
        self._attendance = Attendance(watches, self._wake_all)
        if self._settings.label_nodes:
            self._observer.node_changed = self._check_node
            self._in_background(self._node_labels.run())
        if self._election:
            self._in_background(self._election.hold())
        for watch in watches:
            self._in_background(watch.run())
        labelled_pods = self._watch_labelled_pods() if self._settings.diagnose_pods else []
        self._health.watching([*watches, *labelled_pods])
        self._in_background(self._observer.unplaced.run())
        self._in_background(self._recorder.run())
        self._in_background(self._read_api_groups())
        settled = [watch.settled for watch in watches]
        self._reconciling = self._in_background(self._reconcile([*settled, self._api_groups_read]))

    def _watch_labelled_pods(self) -> list[Reflector]:
        """Watches of the pods of other workloads. Jobs are reconciled without waiting for them."""
        recorder = EventRecorder(self._diagnosis_client, instance=self._identity)
        pods = LabelledPods(self._diagnosis_client, recorder)
        watches = [
            Reflector(self._watch_client, PODS, pods, namespace=namespace, label_selector=SELECTOR)
            for namespace in self._settings.namespaces or (None,)
        ]
        for work in (pods.run(), recorder.run(), *(watch.run() for watch in watches)):
            self._in_background(work)
        return watches

    async def _reconcile(self, prerequisites: list[asyncio.Event]) -> None:
        self._health.ready = False
        for known in prerequisites:
            await known.wait()
        self._health.ready = True
        _log.info("caches filled", jobs=len(self._observer.jobs), pods=len(self._observer.pods))
        await self._unfinished.keep_only({key for key, _ in self._observer.jobs.items()})
        await self._loop.run()

    async def _hand_over(self) -> None:
        """Finish pending writes, then release the Lease so that another replica can lead at once."""
        if self._reconciling is None:
            return
        self._queue.close()
        if not self._health.ready:
            self._reconciling.cancel()
        await asyncio.wait((self._reconciling,), timeout=_STOP_WITHIN_SECONDS)
        self._reconciling = None
        with suppress(TimeoutError):
            async with asyncio.timeout(_EVENTS_WRITTEN_WITHIN_SECONDS):
                await self._recorder.flush()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._election:
            await self._election.release()
        LEADER.set(0)
        for client in (self._client, self._watch_client, self._event_client, self._diagnosis_client):
            await client.close()
        _log.info("stopped")

    async def _read_api_groups(self) -> None:
        """Refresh the list of API groups: Volcano and Kueue may be installed after the operator."""
        while True:
            try:
                groups = await self._watch_client.api_groups()
            except ApiError as error:
                _log.warning("cannot read the API groups of the cluster", error=error.message)
            else:
                self._executor.workloads = workloads_served(groups)
                self._observer.set_api_groups(frozenset(groups))
                self._api_groups_read.set()
            self._api_groups_outdated.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_API_GROUPS_READ_EVERY_SECONDS if self._api_groups_read.is_set() else 2.0):
                    await self._api_groups_outdated.wait()
            await asyncio.sleep(_API_GROUPS_READ_AT_MOST_EVERY_SECONDS)

    def _priority_of(self, key: Key) -> Priority:
        return Priority.RUNNING if self._observer.runs(key) else Priority.PENDING

    def _wake(self, key: Key) -> None:
        """Queue the job, if everything about it is known."""
        if self._attendance.includes(key[0]):
            self._queue.add(key)

    def _wake_all(self, namespace: str | None) -> None:
        for key, _ in self._observer.jobs.items():
            if namespace in (None, key[0]):
                self._queue.add(key)

    def _check_node(self, fact: NodeFact) -> None:
        self._node_labels.check(fact.node.name, has_gpus=fact.node.gpus > 0, labelled=fact.labelled)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        self._tasks.append(task)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if lost := _leadership_lost(error):
            _log.error("leadership lost, exiting", reason=str(lost))
            os._exit(EXIT_LEADERSHIP_LOST)
        self._failure = self._failure or error
        self._stop.set()


def _unfinished_reconciles(election: LeaderElection | None) -> UnfinishedReconciles:
    """Those of the process that led before, as the Lease has them."""
    if election is None:
        return UnfinishedReconciles()
    return UnfinishedReconciles(election.annotation(ANNOTATION), partial(election.annotate, ANNOTATION))


def _leadership_lost(error: BaseException) -> LeadershipLost | None:
    if isinstance(error, LeadershipLost):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(_leadership_lost, error.exceptions)), None)
    return None


# --- Kopf ---


_RETRY_SECONDS = (0.5, 1.0, 2.0, 5.0, *[10.0] * 1000)
"""Waits between kopf's attempts to read the API's discovery. Kopf ends the process after the last one."""


async def run_in_kopf(
    connection: Connection, *, start: Callable[[], None], stop: Callable[[], Awaitable[None]], stop_flag: asyncio.Event
) -> None:
    """Call `start`, wait for a signal or for `stop_flag`, then call `stop`.

    Background tasks that `start` creates must have ended when `stop` returns: kopf cancels the others.

    RLJobs are watched by `kube.watch.Reflector`, as pods and StepReports are. Decisions need a complete cache, and
    kopf's watch (1.45.2, `kopf/_cogs/clients/watching.py` and `kopf/_core/reactor/queueing.py`) cannot fill one:

    - It reports no deletion that happened while its watch was down. After a 410 it lists again and sends an event of
      type None for each object that exists; indexes and memories keep the others.
    - It does not report the end of a listing: `Bookmark.LISTED` stays inside the watcher, and no handler is called
      for an empty cluster.
    - A watch that goes silent and an error event other than 410 are handled without the application: its health
      checks cannot see the first, and the second ends the process.

    With kopf's watch each listing had to be repeated by the operator itself, and each RLJob was decoded twice.
    """
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def log_in(**_: Any) -> kopf.AiohttpSession:
        return kopf.AiohttpSession(server=connection.server, aiohttp_session=connection.session(connections=0))

    @kopf.on.startup(registry=registry)
    async def started(**_: Any) -> None:
        start()

    @kopf.on.cleanup(registry=registry)
    async def stopped(**_: Any) -> None:
        await stop()

    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.networking.error_backoffs = _RETRY_SECONDS
    await kopf.operator(registry=registry, settings=settings, standalone=True, clusterwide=True, stop_flag=stop_flag)
