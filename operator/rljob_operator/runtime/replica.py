"""One replica: connects, waits for the API server and for leadership, and leads until it is stopped."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import ssl
import uuid
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import structlog
from aiohttp import web

from rljob_api.metadata import GROUP
from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.connection import Connection, connect
from rljob_operator.kube.errors import ApiError, RetryPolicy
from rljob_operator.kube.lease import LeaderElection
from rljob_operator.kube.resources import ENDPOINT_SLICES
from rljob_operator.runtime.endpoints import Certificate, Health, TokenCheck, metrics_app, probes_app
from rljob_operator.runtime.leader import Leader
from rljob_operator.runtime.reconcile_loop import Reconcile
from rljob_operator.settings import OperatorSettings

_log = structlog.get_logger(__name__)

_IMPATIENT = RetryPolicy(attempts=3, longest_retry_after_seconds=1.0)
"""For the Lease and for reviews of tokens: a late answer is useless."""

_COLLECT_AFTER = (50_000, 20, 20)
"""Thresholds of the garbage collector. With Python's default of 700 new objects, it runs hundreds of times while a
large document is decoded: 180 ms instead of 20 ms for 450,000 empty lists, in one call that nothing interrupts."""


def run_replica(settings: OperatorSettings, reconcile: Reconcile) -> None:
    """Run one replica until SIGTERM or SIGINT. Raises the error that stopped it.

    If leadership is lost, the process exits at once with code 3, because another replica may already lead.
    """
    gc.set_threshold(*_COLLECT_AFTER)
    with suppress(asyncio.CancelledError):
        asyncio.run(_operate(settings, connect(), reconcile))


async def _operate(settings: OperatorSettings, connection: Connection, reconcile: Reconcile) -> None:
    _cancel_on_signal()
    async with AsyncExitStack() as stack:
        lease_client = _impatient_client(stack, connection)
        health = Health(settings.stale_watch_seconds)
        await _serve(stack, probes_app(health), settings.probes_port)
        if settings.metrics_port:
            # Another client than the Lease's: callers without any right cause these requests.
            may_read = TokenCheck(_impatient_client(stack, connection)) if settings.metrics_auth else None
            await _serve(stack, metrics_app(may_read), settings.metrics_port, await _tls(stack, settings))
        await _wait_for_crds(lease_client)
        if settings.network_policy and not settings.api_server_ports:
            ports = await api_server_ports(lease_client, connection.server)
            settings = settings.model_copy(update={"api_server_ports": ports})
        settings = settings.model_copy(update={"lease_namespace": settings.lease_namespace or connection.namespace})
        election = _election(settings, lease_client)
        if election:
            await election.acquire(health.standing_by)
            stack.push_async_callback(election.release)  # also if a signal comes before the Leader begins
        await Leader(settings, connection, election, health, reconcile, identity=_pod_name()).lead()


async def _serve(stack: AsyncExitStack, app: web.Application, port: int, tls: ssl.SSLContext | None = None) -> None:
    """Serve on all addresses of the pod until the stack is left."""
    runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, port=port, ssl_context=tls).start()


def _impatient_client(stack: AsyncExitStack, connection: Connection) -> ApiClient:
    client = ApiClient(connection, concurrency=2, timeout_seconds=5.0, retry=_IMPATIENT)
    stack.push_async_callback(client.close)
    return client


async def _tls(stack: AsyncExitStack, settings: OperatorSettings) -> ssl.SSLContext | None:
    if not settings.metrics_tls:
        return None
    directory = Path(settings.metrics_certificate) if settings.metrics_certificate else None
    certificate = await asyncio.to_thread(Certificate, directory)
    stack.callback(asyncio.create_task(certificate.follow()).cancel)
    return certificate.context


def _election(settings: OperatorSettings, client: ApiClient) -> LeaderElection | None:
    if not settings.leader_election:
        return None
    return LeaderElection(
        client,
        name=settings.lease_name,
        namespace=settings.lease_namespace,
        identity=f"{_pod_name()}_{uuid.uuid4()}",
    )


def _pod_name() -> str:
    """Name of the pod, or of the machine outside a pod."""
    return socket.gethostname()


async def _wait_for_crds(client: ApiClient) -> None:
    """Return when the CustomResourceDefinitions are installed."""
    logged = False
    while True:
        try:
            if GROUP in await client.api_groups():
                return
            problem = (
                f"expected the CustomResourceDefinitions of {GROUP}, found none; "
                "install them with kubectl apply --server-side -f crds/manifests"
            )
        except ApiError as error:
            problem = error.message
        if not logged:
            _log.warning("waiting for the API server", reason=problem)
            logged = True
        await asyncio.sleep(2.0)


def _cancel_on_signal() -> None:
    """Stop a standby replica on SIGTERM and SIGINT. Kopf replaces these handlers when it starts."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    for number in (signal.SIGTERM, signal.SIGINT):
        if task:
            loop.add_signal_handler(number, task.cancel)


# --- Ports of the API server ---


_NAME, _NAMESPACE = "kubernetes", "default"
"""The API server maintains a Service and an EndpointSlice of this name."""

_SERVICE_PORT = 443
_USUAL_PORT = 6443


async def api_server_ports(client: ApiClient, server: str) -> tuple[int, ...]:
    """Ports of the Service `kubernetes` and of its endpoints. `server`: URL that this process uses itself.

    Network plugins differ: some compare a policy with the port of the Service, others with that of the endpoint.
    """
    ports = {_SERVICE_PORT, urlsplit(server).port or _SERVICE_PORT}
    try:
        endpoints = await client.get(ENDPOINT_SLICES, _NAME, _NAMESPACE)
    except ApiError as error:
        _log.warning(
            "ports of the API server not discovered; if jobs cannot reach it, set --api-server-ports",
            error=error.message,
            assumed=sorted(ports | {_USUAL_PORT}),
        )
        return tuple(sorted(ports | {_USUAL_PORT}))
    found = {port["port"] for port in endpoints.get("ports") or () if port.get("port")}
    return tuple(sorted(ports | found))
