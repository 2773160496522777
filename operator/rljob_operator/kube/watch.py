"""A reflector: keeps a local copy of one kind of object up to date by listing once and then watching."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import aiohttp
import structlog

from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.decoding import decode
from rljob_operator.kube.errors import ApiError, Forbidden, Gone, NotFound, error_of
from rljob_operator.kube.resources import Object, Resource

_log = structlog.get_logger(__name__)

Key = tuple[str, str]
"""Namespace (empty for cluster-wide objects) and name."""

INACTIVITY_SECONDS = 70.0
"""Bookmarks arrive about once a minute. A stream that is silent for longer is dead, even if TCP keeps it open."""

_SERVER_TIMEOUT_SECONDS = (300, 600)
_LONGEST_WAIT_SECONDS = 15.0


class Sink(Protocol):
    """Receiver of objects."""

    def put(self, obj: Object) -> None:
        """Take an object in its present state; the same state may arrive more than once."""

    def remove(self, obj: Object) -> None:
        """Remove an object, given its last state."""

    def keep_only(self, keys: set[Key], resource_version: str, namespace: str | None) -> None:
        """Remove all objects of the namespace that are not in `keys`, which a listing at this revision returned."""


def key_of(obj: Object) -> Key:
    metadata = obj["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


class Reflector:
    """Feeds a sink with the objects of one resource, from one namespace or from all."""

    def __init__(
        self,
        client: ApiClient,
        resource: Resource,
        sink: Sink,
        *,
        namespace: str | None = None,
        label_selector: str = "",
        optional: bool = False,
        inactivity_seconds: float = INACTIVITY_SECONDS,
        reconnect_seconds: float = 1.0,
    ) -> None:
        self.resource = resource
        self.optional = optional
        """The operator also works if the API server refuses this watch."""
        self.synced = asyncio.Event()
        """Set once the first listing is in the sink."""
        self.settled = asyncio.Event()
        """Set once it is known that the first listing is in the sink, or that the namespace is unattended."""
        self.is_unattended = False
        """The API server refuses (403, 404) to list or to watch the namespace: it is gone, or its Role is."""
        self.attendance_changed: Callable[[], None] = lambda: None
        """Called when the first listing is in the sink, and when `is_unattended` changes."""
        self.namespace = namespace
        self._client = client
        self._sink = sink
        self._label_selector = label_selector
        self._inactivity_seconds = inactivity_seconds
        self._reconnect_seconds = reconnect_seconds
        self._heard_at = time.monotonic()
        self._version = ""
        """resourceVersion of the sink; empty if unknown."""
        self._failures = 0

    @property
    def age_seconds(self) -> float:
        """Time since the last event, bookmark or listing."""
        return time.monotonic() - self._heard_at

    async def run(self) -> None:
        """List and watch until cancelled. Errors are logged, and retried with back-off."""
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._watch()
                wait_seconds = self._reconnect_seconds
            except Gone:
                self._version = ""
                wait_seconds = self._reconnect_seconds
            except (ApiError, aiohttp.ClientError, TimeoutError) as error:
                wait_seconds = self._back_off(error)
                may_be_refused = self.optional or self.namespace is not None
                if may_be_refused and isinstance(error, Forbidden | NotFound):
                    self._set_unattended(True)
            except Exception as error:  # an event of an unknown form: the same revision would bring it again
                self._version = ""
                wait_seconds = self._back_off(error)
            await asyncio.sleep(wait_seconds * random.uniform(0.5, 1.0))

    def _back_off(self, error: Exception) -> float:
        """Log the error, and return the seconds to wait."""
        wait_seconds = min(self._reconnect_seconds * 2.0 ** min(self._failures, 8), _LONGEST_WAIT_SECONDS)
        self._failures += 1
        _log.warning("watch interrupted", resource=self.resource.plural, error=str(error) or type(error).__name__)
        return wait_seconds

    async def _list(self) -> None:
        """Bring the sink to the state of the API server."""
        keys, version = set[Key](), ""
        async for page, page_version in self._client.list_pages(self.resource, self.namespace, self._label_selector):
            version = page_version
            for obj in page:
                keys.add(key_of(obj))
                self._feed(self._sink.put, obj)
        self._sink.keep_only(keys, version, self.namespace)
        self._version = version
        self._heard_at = time.monotonic()
        self._set_unattended(False)
        if not self.synced.is_set():
            self.synced.set()
            self.attendance_changed()

    def _set_unattended(self, unattended: bool) -> None:
        self.settled.set()
        if unattended != self.is_unattended:
            self.is_unattended = unattended
            self.attendance_changed()

    async def _watch(self) -> None:
        """Feed the sink from one stream until it closes."""
        query = {
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(random.randint(*_SERVER_TIMEOUT_SECONDS)),
        }
        if self._label_selector:
            query["labelSelector"] = self._label_selector
        async with asyncio.timeout(self._inactivity_seconds):
            response = await self._client.watch(self.resource, self.namespace, query)
        async with response:
            self._heard_at = time.monotonic()
            self._set_unattended(False)
            async for line in _lines(response, self._inactivity_seconds):
                self._heard_at = time.monotonic()
                self._take(await decode(line))
                self._failures = 0

    def _take(self, event: Any) -> None:
        kind, obj = event["type"], event["object"]
        match kind:
            case "ADDED" | "MODIFIED":
                self._feed(self._sink.put, obj)
            case "DELETED":
                self._feed(self._sink.remove, obj)
            case "ERROR":
                raise error_of(int(obj.get("code", 500)), obj)
        self._version = obj["metadata"]["resourceVersion"]

    def _feed(self, take: Callable[[Object], None], obj: Object) -> None:
        """Hand the object to the sink. An error affects only this object."""
        try:
            take(obj)
        except Exception:
            _log.exception("object ignored; this is a bug in the operator", resource=self.resource.plural)


async def _lines(response: aiohttp.ClientResponse, inactivity_seconds: float) -> AsyncIterator[bytes]:
    """Lines of any length. Raises TimeoutError if the stream is silent for `inactivity_seconds`."""
    rest = b""
    while True:
        async with asyncio.timeout(inactivity_seconds):
            chunk = await response.content.readany()
        if not chunk:
            return
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line:
                yield line
