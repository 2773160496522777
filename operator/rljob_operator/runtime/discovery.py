"""Facts about the cluster that the operator reads: its CRDs, its API groups and the ports of the API server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

import structlog

from rljob_api.metadata import GROUP
from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.errors import ApiError
from rljob_operator.kube.resources import ENDPOINT_SLICES

_log = structlog.get_logger(__name__)

_API_GROUPS_SECONDS = 600.0
_RETRY_SECONDS = 2.0
_SERVICE_PORT, _USUAL_PORT = 443, 6443


async def wait_for_crds(client: ApiClient) -> None:
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
        await asyncio.sleep(_RETRY_SECONDS)


async def follow_api_groups(
    client: ApiClient, on_groups: Callable[[dict[str, str]], None], outdated: asyncio.Event
) -> None:
    """Call `on_groups` with all API groups and their preferred versions, until cancelled.

    They are read every ten minutes and when `outdated` is set, because Volcano and Kueue may be installed later.
    """
    known = False
    while True:
        outdated.clear()
        try:
            on_groups(await client.api_groups())
            known = True
        except ApiError as error:
            _log.warning("cannot read the API groups of the cluster", error=error.message)
        with suppress(TimeoutError):
            async with asyncio.timeout(_API_GROUPS_SECONDS if known else _RETRY_SECONDS):
                await outdated.wait()
        await asyncio.sleep(1.0)


async def api_server_ports(client: ApiClient, server: str) -> tuple[int, ...]:
    """Ports of the Service `kubernetes` and of its endpoints. `server`: URL that this process uses itself.

    Network plugins differ: some compare a policy with the port of the Service, others with that of the endpoint.
    """
    ports = {_SERVICE_PORT, urlsplit(server).port or _SERVICE_PORT}
    try:
        endpoints = await client.get(ENDPOINT_SLICES, "kubernetes", "default")
    except ApiError as error:
        assumed = tuple(sorted(ports | {_USUAL_PORT}))
        hint = "ports of the API server not discovered; if jobs cannot reach it, set --api-server-ports"
        _log.warning(hint, error=error.message, assumed=assumed)
        return assumed
    return tuple(sorted(ports | {port["port"] for port in endpoints.get("ports") or () if port.get("port")}))
