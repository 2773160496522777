"""Requests to the API server on plain dictionaries: typed errors, retries and a limit on concurrency.

The reason for not using the package `kubernetes` is in `kube.connection`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlencode

import aiohttp
from pydantic_core import from_json
from yarl import URL

from rljob_operator.kube.connection import Connection
from rljob_operator.kube.errors import RetryPolicy, Unavailable, error_of
from rljob_operator.kube.resources import Object, Resource, resource_of
from rljob_operator.labels import FIELD_MANAGER
from rljob_operator.metrics import API_REQUESTS

_APPLY = "application/apply-patch+yaml"
_MERGE_PATCH = "application/merge-patch+json"
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
        self._server = connection.server
        self._session = connection.session(concurrency)
        self._slots = asyncio.Semaphore(concurrency)
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._retry = retry or RetryPolicy()
        self._guard = guard

    async def close(self) -> None:
        await self._session.close()

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
                page = await self._request("list", resource, path, query, shortened=limit > 1)
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
        query = {"fieldManager": FIELD_MANAGER}
        return await self._request("create", resource, resource.path(namespace), query, manifest, _JSON)

    async def apply(self, manifest: Object, uid: str) -> Object:
        """Server-side apply to the object with this uid; forces ownership of the fields.

        The manifest names its namespace. Raises Conflict if there is no object, or one with another uid.
        """
        resource, metadata = resource_of(manifest), manifest["metadata"]
        manifest = manifest | {"metadata": metadata | {"uid": uid}}
        path = resource.path(metadata["namespace"], metadata["name"])
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        return await self._request("apply", resource, path, query, manifest, _APPLY)

    async def patch(
        self, resource: Resource, name: str, patch: Object, namespace: str | None = None, subresource: str | None = None
    ) -> Object:
        """JSON merge patch. Raises Conflict if the patch names a resourceVersion that is not the current one."""
        path = resource.path(namespace, name, subresource)
        return await self._request("patch", resource, path, {"fieldManager": FIELD_MANAGER}, patch, _MERGE_PATCH)

    async def update(self, resource: Resource, name: str, manifest: Object, namespace: str | None = None) -> Object:
        """Replace the object. Raises Conflict if the manifest does not have the current resourceVersion."""
        query = {"fieldManager": FIELD_MANAGER}
        return await self._request("update", resource, resource.path(namespace, name), query, manifest, _JSON)

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
        return await self._request("delete", resource, resource.path(namespace, name), {}, options, _JSON)

    # --- requests ---

    async def watch(self, resource: Resource, namespace: str | None, query: dict[str, str]) -> aiohttp.ClientResponse:
        """Open a stream of watch events, one JSON object per line. The caller reads and closes it."""
        url = self._url(resource.path(namespace), query | {"watch": "true"})
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=None)
        try:
            response = await self._session.get(url, timeout=timeout)
        except (aiohttp.ClientError, TimeoutError) as error:
            API_REQUESTS.labels("watch", resource.plural, "none").inc()
            raise _no_answer(error) from error
        API_REQUESTS.labels("watch", resource.plural, response.status).inc()
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
        content_type: str = "",
        accept: str = "",
        shortened: bool = False,
    ) -> Object:
        """`shortened`: raise _PageTooLarge for a response that is longer than _LARGEST_PAGE_BYTES."""
        data = json.dumps(body, separators=(",", ":")).encode() if body is not None else None
        url, headers = self._url(path, query), {"Content-Type": content_type} if data else {}
        if accept:
            headers["Accept"] = accept
        tries = 0
        while True:
            tries += 1
            try:
                async with self._slots:
                    if data is not None and self._guard is not None:
                        self._guard()
                    plural = resource.plural if resource else "apis"
                    return await self._send(verb, plural, url, data, headers, shortened=shortened)
            except Unavailable as error:
                wait_seconds = self._retry.wait_seconds(tries, error)
                if wait_seconds is None:
                    raise
            await asyncio.sleep(wait_seconds)

    async def _send(
        self, verb: str, plural: str, url: URL, data: bytes | None, headers: dict[str, str], *, shortened: bool
    ) -> Object:
        method = _METHODS[verb]
        code = "none"
        try:
            async with self._session.request(
                method, url, data=data, headers=headers, timeout=self._timeout
            ) as response:
                code = str(response.status)
                body = await _body(response, _LARGEST_PAGE_BYTES if shortened else None)
                if response.status >= 400:
                    raise error_of(response.status, body, response.headers.get("Retry-After"))
                if not isinstance(body, dict):
                    raise Unavailable(f"expected a JSON object from the API server, found {str(body)[:100]!r}")
                return body
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _no_answer(error) from error
        finally:
            API_REQUESTS.labels(verb, plural, code).inc()

    def _url(self, path: str, query: dict[str, str] | None) -> URL:
        return URL(f"{self._server}{path}?{urlencode(query)}" if query else f"{self._server}{path}", encoded=True)


_METHODS = {
    "get": "GET",
    "list": "GET",
    "create": "POST",
    "apply": "PATCH",
    "patch": "PATCH",
    "update": "PUT",
    "delete": "DELETE",
}


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


# --- Decoding ---


MAX_LEVELS = 190
"""Levels of a document that are kept; `from_json` raises ValueError above 200."""

NESTED_TOO_DEEPLY = "rljob.dev/nested-too-deeply"
"""Key of the object that replaces a value below MAX_LEVELS."""

_PLACEHOLDER = b'{"%s":true}' % NESTED_TOO_DEEPLY.encode()
_BRACKET = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[][{}]', re.DOTALL)
"""A bracket, or a string, in which brackets do not count."""


_LARGE_BYTES = 64 << 10
"""Size above which a document is decoded in a thread. A large pod takes 20 ms, and many of them arrive at once: on the
event loop, nothing else would run until all have been decoded."""

_decoder = ThreadPoolExecutor(1, "decoder")
"""One thread: several would compete with the event loop for the interpreter."""


async def decode(data: bytes) -> Any:
    """The document, up to MAX_LEVELS levels of it. Raises ValueError if it is not JSON.

    The API server stores objects that are nested up to 10,000 levels deep in fields without a schema, such as pod
    templates. Python's json module raises RecursionError at about 990 levels, and code that walks such an object does
    too. Here, everything deeper than MAX_LEVELS is replaced by a placeholder, so that the rest of the document can be
    used: a page with one such object still has all its objects, and that object still has its name and its status.
    """
    if len(data) < _LARGE_BYTES:
        return _decoded(data)
    return await asyncio.get_running_loop().run_in_executor(_decoder, _decoded, data)


def _decoded(data: bytes) -> Any:
    try:
        return from_json(data)
    except ValueError:
        return from_json(prune(data))  # about 1 s for the largest possible object


def prune(data: bytes) -> bytes:
    """The JSON document with a placeholder in place of each object and array below MAX_LEVELS."""
    kept, level, start = list[bytes](), 0, 0
    for found in _BRACKET.finditer(data):
        match data[found.start()]:
            case 0x7B | 0x5B:  # { [
                level += 1
                if level == MAX_LEVELS + 1:
                    kept += (data[start : found.start()], _PLACEHOLDER)
            case 0x7D | 0x5D:  # } ]
                level -= 1
                if level == MAX_LEVELS:
                    start = found.end()
    kept.append(data[start:])
    return b"".join(kept)
