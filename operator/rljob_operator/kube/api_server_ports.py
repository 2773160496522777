"""Ports of the API server as pods reach it, for NetworkPolicies."""

from __future__ import annotations

from urllib.parse import urlsplit

import structlog

from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.errors import ApiError
from rljob_operator.kube.resources import ENDPOINT_SLICES

_log = structlog.get_logger(__name__)

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
