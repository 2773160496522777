"""Requests to the API server on plain dictionaries, through the REST layer of `kubernetes.aio`.

The package (version 37) provides configuration, credentials, TLS and HTTP; this module adds typed errors, retries, a
guard before each write, pages of limited size, and JSON that is nested too deeply. Its models are not used: the
operator reads a few fields of each object, and keeps none of them whole. Without models, `call_api` adds nothing to the
REST layer: 4,000 patches take 1.63 s of CPU time with it and 1.61 s here (`bench/programs/operator_libraries.py`), on a
session that does not read the environment for each request.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config
from kubernetes.aio.config.incluster_config import SERVICE_TOKEN_FILENAME
from kubernetes.aio.config.kube_config import KubeConfigLoader
from yarl import URL

from rljob_operator.kube.decoding import decode
from rljob_operator.kube.errors import RetryPolicy, Unavailable, error_of
from rljob_operator.kube.resources import PODS, Object, Resource, resource_of
from rljob_operator.labels import FIELD_MANAGER
from rljob_operator.metrics import API_REQUESTS

_MANAGER = {"fieldManager": FIELD_MANAGER}
_APPLY = "application/apply-patch+yaml"
_MERGE_PATCH = "application/merge-patch+json"
_STRATEGIC_PATCH = "application/strategic-merge-patch+json"
_JSON = "application/json"
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
PAGE = 100
"""Most objects in a page of a list; the bodies of a page are in memory together."""
_LARGEST_PAGE_BYTES = 8 << 20
"""A longer page is requested again with fewer objects. Objects have up to 1.5 MiB; parsed, they take several times
their size."""


class _PageTooLarge(Exception):
    """The page is longer than _LARGEST_PAGE_BYTES."""


class ApiClient:
    """A client with its own pool of connections. Requests beyond `concurrency` wait, first in, first out.

    `guard` is called before each write and may raise: an operator that is no longer the leader must not write.
    A write whose response was lost is sent again. That is safe: names are fixed, patches name the resourceVersion
    that they were made for, deletions name the uid.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        concurrency: int,
        timeout_seconds: float = 15.0,
        retry: RetryPolicy | None = None,
        guard: Callable[[], None] | None = None,
    ) -> None:
        self._configuration = connection.configuration
        self._rest = RESTClientObject(connection.configuration)
        self._rest.maxsize = concurrency
        self._slots = asyncio.Semaphore(concurrency)
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._retry = retry or RetryPolicy()
        self._guard = guard

    async def close(self) -> None:
        await self._rest.close()

    # --- reads ---

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Object:
        """Return the object. All methods raise the errors of `kube.errors`."""
        return await self._request("get", resource, resource.path(namespace, name))

    async def get_metadata(self, resource: Resource, name: str, namespace: str | None = None) -> Object:
        """Return the metadata of the object; its content is not transmitted."""
        found = await self._request("get", resource, resource.path(namespace, name), accept=_METADATA)
        return dict(found["metadata"])

    async def list_pages(
        self, resource: Resource, namespace: str | None = None, label_selector: str = ""
    ) -> AsyncIterator[tuple[list[Object], str]]:
        """Pages of a consistent list, each with the resourceVersion of the list."""
        query = {"labelSelector": label_selector} if label_selector else {}
        path, limit = resource.path(namespace), PAGE
        while True:
            query["limit"] = str(limit)
            try:
                page = await self._request(
                    "list", resource, path, query, at_most_bytes=_LARGEST_PAGE_BYTES if limit > 1 else None
                )
            except _PageTooLarge:
                limit = max(limit // 4, 1)
                continue
            limit = min(2 * limit, PAGE)
            metadata = page.get("metadata") or {}
            yield page.get("items") or [], str(metadata.get("resourceVersion", "0"))
            if not metadata.get("continue"):
                return
            query["continue"] = metadata["continue"]

    async def api_groups(self) -> dict[str, str]:
        """Names of the API groups that the API server serves, with the version that it prefers."""
        groups = await self._request("get", None, "/apis")
        return {
            group["name"]: str((group.get("preferredVersion") or {}).get("version") or "")
            for group in groups.get("groups") or ()
        }

    # --- writes ---

    async def create(self, resource: Resource, manifest: Object, namespace: str | None = None) -> Object:
        """Create the object. Raises AlreadyExists if the name is taken."""
        return await self._request("create", resource, resource.path(namespace), _MANAGER, manifest)

    async def apply(self, manifest: Object, uid: str | None) -> Object:
        """Server-side apply to the object with this uid; forces ownership of the fields.

        The manifest names its namespace. Raises Conflict if there is no object, or one with another uid. `uid` None:
        to any object of this name, which is created if there is none.
        """
        resource, metadata = resource_of(manifest), manifest["metadata"]
        if uid is not None:
            manifest = manifest | {"metadata": metadata | {"uid": uid}}
        path = resource.path(metadata["namespace"], metadata["name"])
        return await self._request("apply", resource, path, _MANAGER | {"force": "true"}, manifest, content_type=_APPLY)

    async def patch(
        self, resource: Resource, name: str, patch: Object, namespace: str | None = None, subresource: str | None = None
    ) -> Object:
        """JSON merge patch. Raises Conflict if the patch names a resourceVersion that is not the current one."""
        path = resource.path(namespace, name, subresource)
        return await self._request("patch", resource, path, _MANAGER, patch, content_type=_MERGE_PATCH)

    async def resize(self, pod: str, patch: Object, namespace: str) -> Object:
        """Strategic merge patch of the resources of a pod's containers. Raises NotFound also before Kubernetes 1.33."""
        path = PODS.path(namespace, pod, "resize")
        return await self._request("patch", PODS, path, _MANAGER, patch, content_type=_STRATEGIC_PATCH)

    async def update(self, resource: Resource, name: str, manifest: Object, namespace: str | None = None) -> Object:
        """Replace the object. Raises Conflict if the manifest does not have the current resourceVersion."""
        return await self._request("update", resource, resource.path(namespace, name), _MANAGER, manifest)

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        uid: str | None = None,
        grace_seconds: int | None = None,
    ) -> Object:
        """Delete the object. Raises NotFound, and Conflict if the object has another `uid`."""
        options: Object = {"preconditions": {"uid": uid}} if uid else {}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        return await self._request("delete", resource, resource.path(namespace, name), None, options)

    # --- requests ---

    async def watch(self, resource: Resource, namespace: str | None, query: dict[str, str]) -> aiohttp.ClientResponse:
        """Open a stream of watch events, one JSON object per line. The caller reads and closes it.

        Raises the errors of `kube.errors`, as all requests do, but is not retried.
        """
        url = self._url(resource.path(namespace), query | {"watch": "true"})
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=None)
        response = await self._open("watch", resource, url, timeout)
        if response.status != 200:
            async with response:
                raise error_of(response.status, await _body(response), response.headers.get("Retry-After"))
        return response

    async def _request(
        self,
        verb: str,
        resource: Resource | None,
        path: str,
        query: dict[str, str] | None = None,
        body: Object | None = None,
        *,
        at_most_bytes: int | None = None,
        **media_types: str,
    ) -> Object:
        """The response, after retries. Raises _PageTooLarge if it is longer than `at_most_bytes`."""
        url = self._url(path, query)
        tries = 0
        while True:
            tries += 1
            try:
                async with self._slots:
                    if body is not None and self._guard is not None:
                        self._guard()
                    return await self._send(verb, resource, url, body, at_most_bytes, **media_types)
            except Unavailable as error:
                wait_seconds = self._retry.wait_seconds(tries, error)
                if wait_seconds is None:
                    raise
            await asyncio.sleep(wait_seconds)

    async def _send(
        self,
        verb: str,
        resource: Resource | None,
        url: URL,
        body: Object | None,
        at_most_bytes: int | None,
        **media_types: str,
    ) -> Object:
        try:
            async with await self._open(verb, resource, url, self._timeout, body, **media_types) as response:
                found = await _body(response, at_most_bytes)
                if response.status >= 400:
                    raise error_of(response.status, found, response.headers.get("Retry-After"))
                if not isinstance(found, dict):
                    raise Unavailable(f"expected a JSON object from the API server, found {str(found)[:100]!r}")
                return found
        except _NO_ANSWER as error:
            raise _no_answer(error) from error

    async def _open(
        self,
        verb: str,
        resource: Resource | None,
        url: URL,
        timeout: aiohttp.ClientTimeout,
        body: Object | None = None,
        *,
        content_type: str = _JSON,
        accept: str = _JSON,
    ) -> aiohttp.ClientResponse:
        """Send one request with the present credentials, and count it. The caller closes the response."""
        headers, code = {"Accept": accept, "Content-Type": content_type}, "none"
        try:
            if token := await self._configuration.get_api_key_with_prefix("BearerToken"):
                headers["Authorization"] = token.strip()
            answer = await self._rest.request(_METHODS[verb], url, headers=headers, body=body, _request_timeout=timeout)
            response: aiohttp.ClientResponse = answer.response
            code = str(response.status)
            return response
        except _NO_ANSWER as error:
            raise _no_answer(error) from error
        finally:
            API_REQUESTS.labels(verb, resource.plural if resource else "apis", code).inc()

    def _url(self, path: str, query: dict[str, str] | None) -> URL:
        address = f"{self._configuration.host}{path}"
        return URL(f"{address}?{urlencode(query)}" if query else address, encoded=True)


_METHODS = dict(
    get="GET", list="GET", watch="GET", create="POST", apply="PATCH", patch="PATCH", update="PUT", delete="DELETE"
)

_NO_ANSWER = (aiohttp.ClientError, OSError, ConfigException)
"""OSError includes TimeoutError; ConfigException: the token could not be read again."""


def _no_answer(error: Exception) -> Unavailable:
    return Unavailable(f"no answer from the API server: {str(error) or type(error).__name__}")


async def _body(response: aiohttp.ClientResponse, at_most_bytes: int | None = None) -> Any:
    """The response as JSON, or as text if it is not JSON, such as a page of a proxy. Raises _PageTooLarge."""
    data = bytearray()
    async for chunk in response.content.iter_any():
        data += chunk
        if at_most_bytes is not None and len(data) > at_most_bytes:
            response.close()
            raise _PageTooLarge
    try:
        return await decode(bytes(data))
    except ValueError:
        return data.decode(errors="replace")


# --- Configuration ---


SERVICE_ACCOUNT = Path(SERVICE_TOKEN_FILENAME).parent
_TOKEN_SECONDS = 60.0
"""Interval at which tokens are read again; the package does the same for service accounts."""

_PROGRAM_SECONDS = 30.0
"""Most time that the program of a kubeconfig may take for a new token."""


class NoConnection(Exception):
    """No cluster to connect to was found."""


@dataclass(frozen=True, slots=True)
class Connection:
    """An API server, the credentials for it, and the operator's own namespace."""

    configuration: Configuration
    namespace: str = "default"


async def connect() -> Connection:
    """The cluster of KUBECONFIG if it is set, else of the pod's service account, else of ~/.kube/config.

    Raises NoConnection.
    """
    configuration = Configuration(
        client_session_kwargs={
            "trust_env": False,
            "read_bufsize": 1 << 18,
            "headers": {"Accept-Encoding": "identity", "User-Agent": "rljob-operator"},
        }
    )
    kubeconfig = os.environ.get("KUBECONFIG")
    try:
        if not kubeconfig and (SERVICE_ACCOUNT / "token").exists():
            load_incluster_config(client_configuration=configuration)
            return Connection(configuration, (SERVICE_ACCOUNT / "namespace").read_text(encoding="utf-8").strip())
        path = kubeconfig or str(Path.home() / ".kube" / "config")
        loader = await load_kube_config(path, client_configuration=configuration, persist_config=False)
    except (OSError, ConfigException) as error:
        raise NoConnection(f"expected a pod's service account or a kubeconfig: {error}; set KUBECONFIG") from error
    configuration.refresh_api_key_hook = _token_refresh(loader)  # type: ignore[assignment]
    return Connection(configuration, loader.current_context["context"].get("namespace") or "default")


def _token_refresh(loader: KubeConfigLoader) -> Callable[[Configuration], Awaitable[None]]:
    """The hook that reads a token file, or runs the program of the kubeconfig, again.

    `kubernetes.aio.config.refresh_token` does so only for programs, and fails for those that return a certificate.
    """
    loaded_at = time.monotonic()

    async def refresh(configuration: Configuration) -> None:
        nonlocal loaded_at
        if time.monotonic() > loaded_at + _TOKEN_SECONDS:
            loaded_at = time.monotonic()
            async with asyncio.timeout(_PROGRAM_SECONDS):
                await loader.load_and_set(configuration)

    return refresh
