"""The API server's address and the operator's credentials: from the pod's service account, or from a kubeconfig.

Kubeconfigs that run a program for their token need the package `kubernetes`: `rljob-operator[kubeconfig]`. Requests go
through `kube.client`: a ready client of `kubernetes.aio` 37 takes 61 MiB, and decoding 2,000 pods into its models takes
0.85 s and 108 MiB, against 0.1 s and 38 MiB as plain JSON.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import kopf

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

_LOGGER = logging.getLogger(__name__)


class NoConnection(Exception):
    """No cluster to connect to was found."""


class TokenFile:
    """A token that the kubelet replaces before it expires; it is read again when the file has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._header: dict[str, str] = {}

    def headers(self) -> dict[str, str]:
        stat = self._path.stat()
        stamp = (stat.st_mtime_ns, stat.st_ino)
        if stamp != self._stamp:
            self._header = {"Authorization": f"Bearer {self._path.read_text(encoding='utf-8').strip()}"}
            self._stamp = stamp
        return self._header


@dataclass(frozen=True, slots=True)
class Connection:
    """An API server and the credentials for it."""

    server: str
    namespace: str
    """The operator's own namespace."""
    tls: ssl.SSLContext = field(repr=False)
    headers: Callable[[], dict[str, str]] = field(repr=False)

    def session(self, connections: int) -> aiohttp.ClientSession:
        """A session that authenticates each request. `connections`: limit, 0 for none. The caller closes it."""

        async def authenticate(
            request: aiohttp.ClientRequest,
            send: Callable[[aiohttp.ClientRequest], Awaitable[aiohttp.ClientResponse]],
        ) -> aiohttp.ClientResponse:
            request.headers.update(self.headers())
            return await send(request)

        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=connections, ssl=self.tls, ttl_dns_cache=60),
            headers={"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "rljob-operator"},
            middlewares=(authenticate,),
            read_bufsize=1 << 18,
        )


def connect(service_account: Path = SERVICE_ACCOUNT) -> Connection:
    """Connect by KUBECONFIG if it is set, else by the pod's service account, else by ~/.kube/config.

    Raises NoConnection.
    """
    if not os.environ.get("KUBECONFIG") and (service_account / "token").exists():
        return _in_cluster(service_account)
    return _from_kubeconfig()


def _in_cluster(service_account: Path) -> Connection:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise NoConnection("expected KUBERNETES_SERVICE_HOST in the environment of a pod, found none")
    return Connection(
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        namespace=(service_account / "namespace").read_text(encoding="utf-8").strip(),
        tls=ssl.create_default_context(cafile=service_account / "ca.crt"),
        headers=TokenFile(service_account / "token").headers,
    )


def _from_kubeconfig() -> Connection:
    """Connection by a kubeconfig, which kopf reads; by the package `kubernetes` if the kubeconfig runs a program."""
    settings = kopf.OperatorSettings()
    try:
        login = kopf.login_with_kubeconfig(settings=settings)
        if login is not None and not (login.token or login.certificate_path or login.certificate_data):
            login = kopf.login_via_client(settings=settings, logger=_LOGGER) or login
    except (OSError, kopf.LoginError) as error:
        raise NoConnection(f"cannot use the kubeconfig: {error}") from error
    if login is None:
        raise NoConnection("expected a pod's service account or a kubeconfig, found neither; set KUBECONFIG")
    headers = login.as_http_headers()
    return Connection(
        server=login.server.rstrip("/"),
        namespace=login.default_namespace or "default",
        tls=login.as_ssl_context(),
        headers=lambda: headers,
    )
