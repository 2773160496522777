"""A proxy between the operator and the API server that counts requests and injects faults.

Tests run in another thread: their calls only set values that the proxy's event loop reads.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from rljob_testing.patience import EFFECT_SECONDS, Deadline

WRITE_VERBS = frozenset({"create", "update", "patch", "delete", "deletecollection"})
_QUESTIONS = ("tokenreviews", "subjectaccessreviews", "selfsubjectaccessreviews", "selfsubjectrulesreviews")
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@dataclass(slots=True)
class RecordedRequest:
    """`resource` is plural, with its subresource: `rljobs/status`. It is empty for other paths such as /version."""

    verb: str
    resource: str
    namespace: str
    name: str
    time: float = field(default_factory=time.monotonic)
    status: int = 0
    """HTTP status of the answer; 0 without an answer so far."""

    @property
    def is_write(self) -> bool:
        """True if the request changes an object of a job: not a Lease, not an access review."""
        return self.verb in WRITE_VERBS and bool(self.resource) and self.resource not in (*_QUESTIONS, "leases")

    def __str__(self) -> str:
        return f"{self.verb} {self.resource} {self.namespace}/{self.name} -> {self.status}"


def read_request(method: str, path: str, query: Mapping[str, str]) -> RecordedRequest:
    """Verb and resource as the API server's authorizer names them."""
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:] if parts[0] == "apis" else []
    namespace = ""
    if len(parts) > 2 and parts[0] == "namespaces" and parts[2] not in ("status", "finalize"):
        namespace, parts = parts[1], parts[2:]
    resource, name = (parts[0] if parts else ""), (parts[1] if len(parts) > 1 else "")
    if len(parts) > 2:
        resource = f"{resource}/{parts[2]}"
    if method == "GET":
        watching = query.get("watch") in ("true", "1")
        verb = "watch" if watching else "get" if name else "list"
    else:
        verb = _VERBS[method] if name or method != "DELETE" else "deletecollection"
    return RecordedRequest(verb, resource, namespace, name)


_HOP_BY_HOP = {"connection", "host", "keep-alive", "proxy-connection", "te", "transfer-encoding", "upgrade"}
_REASONS = {409: "Conflict", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable"}


@dataclass(slots=True)
class RequestFault:
    """A fault for requests with these `verbs` and `resources` (empty: all), at most `times`."""

    status: int | None
    """HTTP status of the answer. None: no answer until the client gives up."""
    verbs: frozenset[str] = frozenset()
    resources: frozenset[str] = frozenset()
    namespace: str | None = None
    """None: in all namespaces, also those of earlier tests, whose jobs may still write while they are deleted."""
    times: int | None = None
    retry_after_seconds: int | None = None
    after_passing: bool = False
    """The API server executes the request, and only the answer is lost."""
    hits: int = 0

    def applies_to(self, request: RecordedRequest) -> bool:
        """Counts a hit if it applies."""
        meant = (not self.verbs or request.verb in self.verbs) and (
            not self.resources or request.resource in self.resources
        )
        meant = meant and self.namespace in (None, request.namespace)
        if not meant or (self.times is not None and self.hits >= self.times):
            return False
        self.hits += 1
        return True


@dataclass(slots=True)
class _Watch:
    request: RecordedRequest
    transport: asyncio.Transport
    closed: bool = False


@dataclass
class FaultProxy:
    """A reverse proxy at `url` for the API server at `upstream`. It injects no faults by default."""

    upstream: str
    ca: Path
    port: int
    requests: list[RecordedRequest] = field(default_factory=list)
    _faults: list[RequestFault] = field(default_factory=list)
    _watches: list[_Watch] = field(default_factory=list)
    _after_change: Callable[[RecordedRequest], None] | None = None
    _versions: dict[tuple[str, str, str], str] = field(default_factory=dict)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # --- what tests say ---

    @contextmanager
    def failing(
        self,
        status: int | None,
        *,
        verbs: tuple[str, ...] = (),
        resources: tuple[str, ...] = (),
        namespace: str | None = None,
        times: int | None = None,
        retry_after_seconds: int | None = None,
        after_passing: bool = False,
    ) -> Iterator[RequestFault]:
        """Inject the fault within the block; its `hits` count the affected requests."""
        fault = RequestFault(
            status, frozenset(verbs), frozenset(resources), namespace, times, retry_after_seconds, after_passing
        )
        self._faults.append(fault)
        try:
            yield fault
        finally:
            self._faults.remove(fault)

    def after_each_change(self, call: Callable[[RecordedRequest], None] | None) -> None:
        """Call `call` with each write that changes an object, after the API server has done it and before its answer
        passes. None: stop.
        """
        self._after_change = call

    def cut_watches(self, *resources: str) -> int:
        """Close the connections of these watches (none named: all), as a load balancer would. Returns their number."""
        watches = self.open_watches(*resources)
        for watch in watches:
            self._loop.call_soon_threadsafe(watch.transport.abort)
        return len(watches)

    def open_watches(self, *resources: str) -> list[_Watch]:
        return [w for w in self._watches if not w.closed and (not resources or w.request.resource in resources)]

    def writes(self, namespace: str | None = None, since: float = 0.0) -> list[RecordedRequest]:
        """Writes that reached the proxy, without Leases and reviews. Namespace "": cluster-scoped objects."""
        return [
            request
            for request in list(self.requests)
            if request.is_write and request.time >= since and namespace in (None, request.namespace)
        ]

    def counts(self, namespace: str | None = None) -> Counter[str]:
        """Requests by verb and resource: `{"create pods": 2, …}`."""
        return Counter(
            f"{request.verb} {request.resource}"
            for request in list(self.requests)
            if namespace in (None, request.namespace)
        )

    def wait_until_quiet(self, seconds: float = 1.0, timeout: float = EFFECT_SECONDS) -> None:
        """Wait until no write has arrived for `seconds`. AssertionError, with the last writes, if that does not
        happen."""
        deadline = Deadline(timeout)
        while not deadline.passed:
            writes = self.writes()
            quiet_since = writes[-1].time if writes else 0.0
            if time.monotonic() - quiet_since >= seconds:
                return
            time.sleep(0.05)
        raise AssertionError(f"still writing after {timeout} s: {[str(w) for w in self.writes()[-10:]]}")

    # --- its life ---

    def start(self) -> None:
        ready = threading.Event()
        threading.Thread(target=lambda: self._loop.run_until_complete(self._serve(ready)), daemon=True).start()
        assert ready.wait(60), "the proxy did not start"

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)

    async def _serve(self, ready: threading.Event) -> None:
        self._stopping = asyncio.Event()
        tls = ssl.create_default_context(cafile=str(self.ca))
        connector = aiohttp.TCPConnector(ssl=tls, limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as self._session:
            server = web.Server(self._handle, access_log=None)
            runner = web.ServerRunner(server, shutdown_timeout=0)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self.port).start()
            ready.set()
            await self._stopping.wait()
            await runner.cleanup()

    # --- one request ---

    async def _handle(self, incoming: web.BaseRequest) -> web.StreamResponse:
        request = read_request(incoming.method, incoming.path, incoming.query)
        self.requests.append(request)
        fault = next((fault for fault in self._faults if fault.applies_to(request)), None)
        if fault is not None and not fault.after_passing:
            return await self._fail(request, fault)
        try:
            answer = await self._pass(incoming, request, fault)
        except aiohttp.ClientError as error:
            request.status = 502
            return web.Response(status=502, text=f"the API server is away: {error}")
        return answer

    async def _pass(
        self, incoming: web.BaseRequest, request: RecordedRequest, fault: RequestFault | None
    ) -> web.StreamResponse:
        headers = {name: value for name, value in incoming.headers.items() if name.lower() not in _HOP_BY_HOP}
        body = await incoming.read()
        url = f"{self.upstream}{incoming.raw_path}"
        async with self._session.request(incoming.method, url, headers=headers, data=body or None) as upstream:
            request.status = upstream.status
            if request.verb == "watch" and upstream.status == 200:
                return await self._stream(incoming, request, upstream)
            content = await upstream.read()
        changed = request.is_write and upstream.ok and self._is_change(request, json.loads(content))
        if changed and self._after_change is not None:
            self._after_change(request)
        if fault is not None:
            return await self._fail(request, fault)
        return web.Response(status=upstream.status, headers=_passed_on(upstream), body=content)

    async def _stream(
        self, incoming: web.BaseRequest, request: RecordedRequest, upstream: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        answer = web.StreamResponse(status=upstream.status, headers=_passed_on(upstream))
        await answer.prepare(incoming)
        transport = incoming.transport
        assert isinstance(transport, asyncio.Transport)
        watch = _Watch(request, transport)
        self._watches.append(watch)
        try:
            async for chunk in upstream.content.iter_any():
                await answer.write(chunk)
        except aiohttp.ClientError:
            transport.abort()  # one side has gone in the middle of the stream: the other shall know
        finally:
            watch.closed = True
        return answer

    async def _fail(self, request: RecordedRequest, fault: RequestFault) -> web.StreamResponse:
        if fault.status is None:
            while fault in self._faults:
                await asyncio.sleep(0.1)
            return web.Response(status=504)
        request.status = fault.status
        status = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "code": fault.status,
            "reason": _REASONS.get(fault.status, "InternalError"),
            "message": "a fault that a test put in",
        }
        headers = {} if fault.retry_after_seconds is None else {"Retry-After": str(fault.retry_after_seconds)}
        return web.json_response(status, status=fault.status, headers=headers)

    def _is_change(self, request: RecordedRequest, answer: dict[str, Any]) -> bool:
        """An object that is applied as it is already keeps its resourceVersion."""
        version = answer.get("metadata", {}).get("resourceVersion", "")
        key = (request.resource.partition("/")[0], request.namespace, answer.get("metadata", {}).get("name", ""))
        before = self._versions.get(key)
        self._versions[key] = version
        return request.verb == "delete" or version != before


def _passed_on(upstream: aiohttp.ClientResponse) -> dict[str, str]:
    kept = {name: value for name, value in upstream.headers.items() if name.lower() not in _HOP_BY_HOP}
    kept.pop("Content-Length", None)
    return kept
