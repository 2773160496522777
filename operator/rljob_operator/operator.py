"""The operator's life: connect, wait to be the leader, fill the caches, look after the jobs, hand over.

Kopf is the shell: it logs in, watches RLJobs, takes the signals. What it sees goes to the caches like everything else.
Nothing is decided in a handler, and nothing is left on the objects: no finalizer, annotation or progress of kopf's.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import uuid
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any

import kopf
import structlog
from aiohttp import web

from rljob_api.names import GROUP, VERSION
from rljob_operator.apply.carry_out import Executor
from rljob_operator.apply.event_recorder import EventRecorder
from rljob_operator.apply.node_labels import NodeLabels
from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.connection import Connection, connect
from rljob_operator.kube.errors import ApiError
from rljob_operator.kube.lease import LeaderElection, LeadershipLost
from rljob_operator.kube.retry import RetryPolicy
from rljob_operator.kube.watch import Reflector
from rljob_operator.metrics import LEADER
from rljob_operator.metrics_endpoint import TokenCheck, metrics_app
from rljob_operator.observe.job_feed import JobFeed
from rljob_operator.observe.node_facts import NodeFact
from rljob_operator.observe.observer import Observer
from rljob_operator.observe.watches import reflectors
from rljob_operator.probes import Health, probes_app
from rljob_operator.reconcile_loop import Reconcile, ReconcileLoop
from rljob_operator.settings import OperatorSettings
from rljob_operator.work_queue import WorkQueue

EXIT_LEADERSHIP_LOST = 3

_log = structlog.get_logger(__name__)

_API_GROUPS_READ_EVERY_SECONDS = 600.0
_STOP_WITHIN_SECONDS = 20.0
_EVENTS_WRITTEN_WITHIN_SECONDS = 2.0
_KOPF_WATCH_SECONDS = 100
"""Kopf's watches are renewed so often: each renewal shows that they live."""
_IMPATIENT = RetryPolicy(attempts=3, longest_retry_after_seconds=1.0)
"""For the Lease: it is of no use later."""
_KOPF_RETRY_SECONDS = (0.5, 1.0, 2.0, 5.0, *[10.0] * 1000)
"""Kopf ends the process when it has used these up: an API server may be away for hours."""


def run_operator(settings: OperatorSettings, reconcile: Reconcile) -> None:
    """Run one replica until SIGTERM or SIGINT. Raises what made it impossible to go on.

    Where the leadership is lost the process ends at once, with EXIT_LEADERSHIP_LOST: another replica may lead already.
    """
    with suppress(asyncio.CancelledError):
        asyncio.run(_operate(settings, connect(), reconcile))


async def _operate(settings: OperatorSettings, connection: Connection, reconcile: Reconcile) -> None:
    _cancel_on_signal()
    async with AsyncExitStack() as stack:
        own = ApiClient(connection, concurrency=2, timeout_seconds=5.0, retry=_IMPATIENT)
        stack.push_async_callback(own.close)
        health = Health(settings.stale_watch_seconds)
        await _serve(stack, probes_app(health), settings.probes_port)
        if settings.metrics_port:
            may_read = TokenCheck(own) if settings.metrics_auth else None
            await _serve(stack, metrics_app(may_read), settings.metrics_port)
        await _crd_installed(own)
        health.ready = True
        election = _election(settings, connection, own)
        if election:
            await election.acquire()
        LEADER.set(1)
        await Leader(settings, connection, election, health, reconcile).lead()


class Leader:
    """The replica that acts."""

    def __init__(
        self,
        settings: OperatorSettings,
        connection: Connection,
        election: LeaderElection | None,
        health: Health,
        reconcile: Reconcile,
    ) -> None:
        self._settings = settings
        self._connection = connection
        self._election = election
        self._health = health
        guard = election.guard if election else None
        self._client = ApiClient(connection, concurrency=settings.api_concurrency, guard=guard)
        self._watch_client = ApiClient(connection, concurrency=4 + 2 * len(settings.namespaces))
        self._event_client = ApiClient(connection, concurrency=1, retry=RetryPolicy(attempts=2), guard=guard)
        self._queue = WorkQueue()
        self._observer = Observer(settings.gpu_resources, self._queue.add)
        self._feed = JobFeed(self._watch_client, self._observer.jobs, settings.namespaces)
        self._recorder = EventRecorder(self._event_client, instance=_identity())
        self._node_labels = NodeLabels(self._client)
        executor = Executor(self._client, self._recorder, self._observer.saw)
        self._loop = ReconcileLoop(settings, self._queue, self._observer, executor, reconcile)
        self._tasks: list[asyncio.Task[None]] = []
        self._reconciling: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None

    async def lead(self) -> None:
        """Until a signal. Raises what made it impossible to go on."""
        try:
            await kopf.operator(
                registry=self._handlers(),
                settings=_kopf_settings(),
                standalone=True,
                clusterwide=not self._settings.namespaces,
                namespaces=self._settings.namespaces,
                stop_flag=self._stop,
            )
        finally:
            await self._hand_over()
        if self._failure:
            raise self._failure

    def _handlers(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry)
        async def log_in(**_: Any) -> kopf.AiohttpSession:
            session = self._connection.session(connections=0, on_answer=self._feed.on_answer)
            return kopf.AiohttpSession(server=self._connection.server, aiohttp_session=session)

        @kopf.on.startup(registry=registry)
        async def start(**_: Any) -> None:
            self._begin()

        @kopf.on.event(GROUP, VERSION, "rljobs", registry=registry)
        async def changed(event: Any, **_: Any) -> None:
            self._feed.on_event(event)

        @kopf.on.cleanup(registry=registry)
        async def stop(**_: Any) -> None:
            await self._hand_over()

        return registry

    def _begin(self) -> None:
        watches = reflectors(
            self._watch_client, self._observer, self._settings.namespaces, watch_nodes=self._settings.watch_nodes
        )
        if self._settings.label_nodes:
            self._observer.node_changed = self._check_node
            self._in_background(self._node_labels.run())
        if self._election:
            self._in_background(self._election.hold())
        sources: list[Reflector | JobFeed] = [*watches, self._feed]
        for source in sources:
            self._in_background(source.run())
        self._health.watching(sources)
        self._in_background(self._recorder.run())
        self._in_background(self._read_api_groups())
        self._reconciling = self._in_background(self._reconcile([source.synced for source in sources]))

    async def _reconcile(self, synced: list[asyncio.Event]) -> None:
        self._health.ready = False
        for filled in synced:
            await filled.wait()
        self._health.ready = True
        _log.info("caches filled", jobs=len(self._observer.jobs), pods=len(self._observer.pods))
        await self._loop.run()

    async def _hand_over(self) -> None:
        """Finish what is being written, and let another replica lead at once."""
        if self._reconciling is None:
            return
        self._queue.close()
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
        for client in (self._client, self._watch_client, self._event_client):
            await client.close()
        _log.info("stopped")

    async def _read_api_groups(self) -> None:
        """Volcano and Kueue may be installed after the operator."""
        while True:
            try:
                groups = await self._watch_client.api_groups()
            except ApiError as error:
                _log.warning("the cluster's API groups cannot be read", error=error.sentence)
            else:
                self._observer.set_api_groups(groups)
            await asyncio.sleep(_API_GROUPS_READ_EVERY_SECONDS)

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
            _log.error("leadership lost, ending at once", reason=str(lost))
            os._exit(EXIT_LEADERSHIP_LOST)
        self._failure = self._failure or error
        self._stop.set()


def _kopf_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.server_timeout = _KOPF_WATCH_SECONDS
    settings.networking.error_backoffs = _KOPF_RETRY_SECONDS
    settings.persistence.diffbase_storage = _NoDiffs()
    settings.queueing.idle_timeout = 1.0
    return settings


class _NoDiffs(kopf.DiffBaseStorage):
    """Kopf compares each object with the one before, for handlers that there are none of here."""

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        pass


def _election(settings: OperatorSettings, connection: Connection, client: ApiClient) -> LeaderElection | None:
    if not settings.leader_election:
        return None
    return LeaderElection(
        client,
        name=settings.lease_name,
        namespace=settings.lease_namespace or connection.namespace,
        identity=f"{_identity()}_{uuid.uuid4()}",
    )


def _identity() -> str:
    """The pod's name, in a pod."""
    return socket.gethostname()


def _leadership_lost(error: BaseException) -> LeadershipLost | None:
    if isinstance(error, LeadershipLost):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(_leadership_lost, error.exceptions)), None)
    return None


async def _crd_installed(client: ApiClient) -> None:
    """Returns when the cluster knows RLJobs."""
    said = False
    while True:
        try:
            if GROUP in await client.api_groups():
                return
            problem = f"expected the CustomResourceDefinitions of {GROUP}, found none; install them: crds/manifests"
        except ApiError as error:
            problem = error.sentence
        if not said:
            _log.warning("waiting for the API server", reason=problem)
            said = True
        await asyncio.sleep(2.0)


async def _serve(stack: AsyncExitStack, app: web.Application, port: int) -> None:
    runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, port=port).start()


def _cancel_on_signal() -> None:
    """For a replica that stands by. Kopf replaces these handlers by its own when it starts."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    for number in (signal.SIGTERM, signal.SIGINT):
        if task:
            loop.add_signal_handler(number, task.cancel)
