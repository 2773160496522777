"""The operator: what starts and stops it, what it watches, and the effect of each event. Kopf runs it.

| watched | cache | effect of an event |
|---|---|---|
| RLJobs, their pods and StepReports | `Observer` | the job is queued, observed, reconciled, and the result applied |
| MemoryProfiles | `Observer` | none: they are read when a job begins |
| nodes | `Observer` | jobs without a place are queued; GPU nodes get their label |
| pods with `rljob.dev/diagnose=true` | none | an out-of-memory failure is reported in Events |

| repeated | |
|---|---|
| 2 s | renew the Lease |
| 10 s | reload the certificate of /metrics if it has changed |
| 10 min, or when an API is missing | read the API groups: Volcano and Kueue may be installed after the operator |
| at the time that a reconcile asks for | queue the job again |

Kopf handles startup, signals and cleanup. The watches are `kube.watch.Reflector`: for 2,000 pods with five changes
each, kopf's watch takes 10.6 to 17.6 s of CPU time, the Reflector 2.3 s; for RLJobs, 13.0 to 18.0 s and 4.2 s
(`bench/programs/operator_libraries.py`). Nor does kopf report the end of a listing, objects that were deleted while the
watch was down, or a watch that is silent. Its liveness endpoint serves one path, where the pod has two.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from itertools import repeat
from typing import Any

import kopf
import structlog

from rljob_operator.apply.event_recorder import EventRecorder
from rljob_operator.apply.executor import Executor
from rljob_operator.apply.node_labels import NodeLabels
from rljob_operator.diagnose.labelled_pods import SELECTOR, LabelledPods
from rljob_operator.kube.client import ApiClient, Connection, connect
from rljob_operator.kube.errors import RetryPolicy
from rljob_operator.kube.lease import LeaderElection, LeadershipLost
from rljob_operator.kube.resources import PODS, RLJOBS, workloads_served
from rljob_operator.kube.watch import Key, Reflector
from rljob_operator.metrics import LEADER
from rljob_operator.observe.observer import Observer
from rljob_operator.observe.watches import Attendance, known_nodes, reflectors
from rljob_operator.reconcile.observed import ObservedNode
from rljob_operator.reconcile.reconcile import reconcile
from rljob_operator.runtime.admission import objection_to, serve_admission
from rljob_operator.runtime.discovery import api_server_ports, follow_api_groups, wait_for_crds
from rljob_operator.runtime.endpoints import Health, TokenCheck, metrics_app, probes_app, serve, tls_context
from rljob_operator.runtime.job_queue import JobQueue
from rljob_operator.runtime.reconcile_loop import ANNOTATION, ReconcileLoop, UnfinishedReconciles
from rljob_operator.settings import OperatorSettings

_log = structlog.get_logger(__name__)

EXIT_LEADERSHIP_LOST = 3

_COLLECT_AFTER = (50_000, 20, 20)
"""Thresholds of the garbage collector. With Python's default of 700 new objects, it runs hundreds of times while a
large document is decoded: 180 ms instead of 20 ms for 450,000 empty lists, in one call that nothing interrupts."""


def run_operator(settings: OperatorSettings) -> None:
    """Run one replica until SIGTERM or SIGINT. Raises the error that stopped it.

    If leadership is lost, the process exits at once with code 3, because another replica may already lead.
    """
    gc.set_threshold(*_COLLECT_AFTER)
    replica = Replica(settings, asyncio.run(connect()))
    kopf.run(memo=replica, stop_flag=replica.ended, standalone=True, clusterwide=True)
    replica.raise_error()


@kopf.on.startup()
async def start(memo: Replica, settings: kopf.OperatorSettings, **_: Any) -> None:
    settings.scanning.disabled = True  # kopf reads the API groups once, and watches nothing
    settings.networking.error_backoffs = repeat(10.0)
    settings.admission.server = partial(serve_admission, memo.settings)
    memo.start()


@kopf.on.login()
async def log_in(memo: Replica, **_: Any) -> kopf.ConnectionInfo:
    """Credentials of kopf's own requests, which wait until the API server has answered."""
    return await memo.credentials()


@kopf.on.cleanup()
async def stop(memo: Replica, **_: Any) -> None:
    await memo.stop()


@kopf.on.validate(RLJOBS.group, RLJOBS.version, RLJOBS.plural)
async def validate(*, warnings: list[str], memo: Replica, **review: Any) -> None:
    """Warn about a job that does not fit, or refuse it. Raises `AdmissionError`."""
    found = await objection_to(review["new"], review["old"], memo.nodes())
    if found is not None and found.refused:
        raise kopf.AdmissionError(found.message, code=403)
    if found is not None:
        warnings.append(found.message)


# --- Any replica ---


class Replica:
    """One process: serves probes and metrics, waits for the CRDs and for leadership, and leads until it is stopped."""

    def __init__(self, settings: OperatorSettings, connection: Connection) -> None:
        self.ended = asyncio.Event()
        self.nodes: Callable[[], Sequence[ObservedNode]] = tuple
        """The nodes of the cluster, as far as this replica knows them."""
        self.settings = settings
        self._connection = connection
        self._health = Health(settings.stale_watch_seconds)
        self._answered = asyncio.Event()
        self._leader: Leader | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Run in the background; `ended` is set at the end."""
        self._task = asyncio.create_task(self.run())
        self._task.add_done_callback(lambda _: self.ended.set())

    async def stop(self) -> None:
        """Return when the leader has handed over, or a standby replica has stopped."""
        assert self._task is not None
        if self._leader:
            self._leader.stopping.set()
        else:
            self._task.cancel()
        await asyncio.wait((self._task,))

    def raise_error(self) -> None:
        """Raise the error that ended the replica, if any."""
        with suppress(asyncio.CancelledError):
            if self._task:
                self._task.result()

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            lease_client = _impatient_client(stack, self._connection)
            await self._serve(stack)
            await wait_for_crds(lease_client)
            self._answered.set()
            settings = await _completed(self.settings, self._connection, lease_client)
            election = None
            if settings.leader_election:
                election = LeaderElection(
                    lease_client,
                    name=settings.lease_name,
                    namespace=settings.lease_namespace,
                    identity=f"{socket.gethostname()}_{uuid.uuid4()}",
                )
                async with AsyncExitStack() as standing_by:
                    if settings.admission_certificate and settings.watch_nodes:
                        known = known_nodes(self._connection, settings.gpu_resources)
                        self.nodes = await standing_by.enter_async_context(known)
                    await election.acquire(self._health.standing_by)
                stack.push_async_callback(election.release)
            self._leader = Leader(settings, self._connection, election, self._health)
            self.nodes = self._leader.nodes
            await self._leader.run()

    async def _serve(self, stack: AsyncExitStack) -> None:
        """Serve probes and metrics until the stack is left."""
        settings = self.settings
        await stack.enter_async_context(serve(probes_app(self._health), settings.probes_port))
        if not settings.metrics_port:
            return
        may_read, tls = None, None
        if settings.metrics_auth:
            # Another client than the Lease's: callers without any right cause these requests.
            may_read = TokenCheck(_impatient_client(stack, self._connection))
        if settings.metrics_tls:
            tls = await tls_context(stack, settings.metrics_certificate)
        await stack.enter_async_context(serve(metrics_app(may_read), settings.metrics_port, tls))

    async def credentials(self) -> kopf.ConnectionInfo:
        """Return the credentials in kopf's form once the API server has answered."""
        await self._answered.wait()
        configuration = self._connection.configuration
        scheme, _, token = (await configuration.get_api_key_with_prefix("BearerToken") or "").strip().partition(" ")
        return kopf.ConnectionInfo(
            server=configuration.host,
            scheme=scheme or None,
            token=token or None,
            ca_path=configuration.ssl_ca_cert,
            insecure=not configuration.verify_ssl,
            certificate_path=configuration.cert_file,
            private_key_path=configuration.key_file,
            proxy_url=configuration.proxy,
            trust_env=False,
        )


async def _completed(settings: OperatorSettings, connection: Connection, client: ApiClient) -> OperatorSettings:
    """The settings, with defaults that depend on the cluster."""
    found: dict[str, Any] = {"lease_namespace": settings.lease_namespace or connection.namespace}
    if settings.network_policy and not settings.api_server_ports:
        found["api_server_ports"] = await api_server_ports(client, connection.configuration.host)
    return settings.model_copy(update=found)


def _impatient_client(stack: AsyncExitStack, connection: Connection) -> ApiClient:
    """Client for the Lease and for reviews of tokens, for which a late answer is useless."""
    retry = RetryPolicy(attempts=3, longest_retry_after_seconds=1.0)
    client = ApiClient(connection, concurrency=2, timeout_seconds=5.0, retry=retry)
    stack.push_async_callback(client.close)
    return client


# --- The leader ---


_STOP_WITHIN_SECONDS = 20.0
_EVENTS_WRITTEN_WITHIN_SECONDS = 2.0


class Leader:
    """The leading replica: fills the caches, reconciles jobs, and hands over when `stopping` is set."""

    def __init__(
        self, settings: OperatorSettings, connection: Connection, election: LeaderElection | None, health: Health
    ) -> None:
        self.stopping = asyncio.Event()
        self._settings = settings
        self._election = election
        self._health = health
        guard = election.guard if election else None
        impatient = RetryPolicy(attempts=2)
        watched = 1 + 5 * max(1, len(settings.namespaces))  # each watch keeps a connection
        self._client = ApiClient(connection, concurrency=settings.api_concurrency, guard=guard)
        self._watch_client = ApiClient(connection, concurrency=watched + 2)
        self._event_client = ApiClient(connection, concurrency=1, retry=impatient, guard=guard)
        self._diagnosis_client = ApiClient(connection, concurrency=1, retry=impatient, guard=guard)

        self._queue = JobQueue(is_running=lambda key: self._observer.runs(key))
        shares_profiles = settings.memory_profiles == "Cluster"
        self._observer = Observer(settings.gpu_resources, self._wake, shares_profiles=shares_profiles)
        self.nodes: Callable[[], Sequence[ObservedNode]] = self._observer.observed_nodes
        self._watches = reflectors(
            self._watch_client,
            self._observer,
            settings.namespaces,
            watch_nodes=settings.watch_nodes,
            watch_profiles=settings.memory_profiles != "Disabled",
        )
        self._attendance = Attendance(self._watches, self._wake_all)
        self._recorder = EventRecorder(self._event_client, instance=socket.gethostname())
        self._node_labels = NodeLabels(self._client)
        if settings.label_nodes:
            self._observer.node_changed = self._node_labels.check
        self._executor = Executor(self._client, self._recorder, self._observer.saw)
        self._unfinished = UnfinishedReconciles()
        if election:  # the process that led before has recorded its own in the Lease
            recorded, record = election.annotation(ANNOTATION), partial(election.annotate, ANNOTATION)
            self._unfinished = UnfinishedReconciles(recorded, record)
        self._loop = ReconcileLoop(settings, self._queue, self._observer, self._executor, reconcile, self._unfinished)
        self._api_groups_read, self._api_groups_outdated = asyncio.Event(), asyncio.Event()
        self._observer.api_groups_outdated = self._api_groups_outdated.set

    async def run(self) -> None:
        """Lead until `stopping` is set. Raises the error that stopped it."""
        LEADER.set(1)
        reconciling = asyncio.create_task(self._reconcile_jobs())
        tasks = [reconciling, *map(asyncio.create_task, self._background())]
        for task in tasks:
            task.add_done_callback(_exit_if_leadership_is_lost)
        stopping = asyncio.create_task(self.stopping.wait())
        try:
            await asyncio.wait((stopping, *tasks), return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            await self._hand_over(reconciling, [stopping, *tasks])

    def _background(self) -> list[Coroutine[Any, Any, None]]:
        """All work other than reconciles; it runs until cancelled."""
        work = [
            self._observer.unplaced.run(),
            self._recorder.run(),
            follow_api_groups(self._watch_client, self._take_api_groups, self._api_groups_outdated),
        ]
        watches = list(self._watches)
        if self._election:
            work.append(self._election.hold())
        if self._settings.label_nodes:
            work.append(self._node_labels.run())
        if self._settings.diagnose_pods:
            recorder = EventRecorder(self._diagnosis_client, instance=socket.gethostname())
            pods = LabelledPods(self._diagnosis_client, recorder)
            watches += [
                Reflector(self._watch_client, PODS, pods, namespace=namespace, label_selector=SELECTOR)
                for namespace in self._settings.namespaces or (None,)
            ]
            work += [pods.run(), recorder.run()]
        self._health.watching(watches)
        return [*work, *(watch.run() for watch in watches)]

    async def _reconcile_jobs(self) -> None:
        """Reconcile jobs once the caches are filled, until the queue is closed."""
        self._health.ready = False
        for watch in self._watches:
            await watch.settled.wait()
        await self._api_groups_read.wait()
        self._health.ready = True
        _log.info("caches filled", jobs=len(self._observer.jobs), pods=len(self._observer.pods))
        await self._unfinished.keep_only({key for key, _ in self._observer.jobs.items()})
        await self._loop.run()

    async def _hand_over(self, reconciling: asyncio.Task[None], tasks: list[asyncio.Task[Any]]) -> None:
        """Finish pending writes. The replica renews the Lease until then, and releases it afterwards."""
        self._queue.close()
        if not self._health.ready:
            reconciling.cancel()
        await asyncio.wait((reconciling,), timeout=_STOP_WITHIN_SECONDS)
        with suppress(TimeoutError):
            async with asyncio.timeout(_EVENTS_WRITTEN_WITHIN_SECONDS):
                await self._recorder.flush()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        LEADER.set(0)
        for client in (self._client, self._watch_client, self._event_client, self._diagnosis_client):
            await client.close()
        _log.info("stopped")

    # --- events ---

    def _wake(self, key: Key) -> None:
        """Queue the job, if everything about it is known."""
        if self._attendance.includes(key[0]):
            self._queue.add(key)

    def _wake_all(self, namespace: str | None) -> None:
        for key, _ in self._observer.jobs.items():
            if namespace in (None, key[0]):
                self._queue.add(key)

    def _take_api_groups(self, groups: dict[str, str]) -> None:
        self._executor.workloads = workloads_served(groups)
        self._observer.set_api_groups(frozenset(groups))
        self._api_groups_read.set()


def _exit_if_leadership_is_lost(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (lost := _leadership_lost(task.exception())):
        _log.error("leadership lost, exiting", reason=str(lost))
        os._exit(EXIT_LEADERSHIP_LOST)


def _leadership_lost(error: BaseException | None) -> LeadershipLost | None:
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(_leadership_lost, error.exceptions)), None)
    return error if isinstance(error, LeadershipLost) else None
