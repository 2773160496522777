"""An HTTP server that gives the answers that a test wrote down, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import Configuration

from rljob_operator.kube.client import ApiClient, Connection
from rljob_operator.kube.errors import RetryPolicy

Object = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    query: dict[str, str]
    body: Any
    content_type: str
    authorization: str | None


@dataclass
class Answer:
    """Status 0: the connection is closed without one. `text`: the body as it is sent, in place of `body`. `lines`: a
    stream that stays open while `open_seconds` last; a line that is a text is sent as it is."""

    status: int = 200
    body: Any = None
    text: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    lines: list[Any] | None = None
    open_seconds: float = 0.0
    after_seconds: float = 0.0


def refusal(code: int, reason: str, message: str = "no", causes: tuple[str, ...] = (), **headers: str) -> Answer:
    details = {"causes": [{"reason": cause} for cause in causes]}
    status = {"kind": "Status", "code": code, "reason": reason, "message": message, "details": details}
    return Answer(code, status, headers={name.replace("_", "-"): value for name, value in headers.items()})


class ScriptedApiServer:
    """Answers by the first rule that fits, each used once; what no rule fits is echoed with a new resourceVersion."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self._script: deque[tuple[str, str, Answer]] = deque()
        self._versions = itertools.count(1000)

    def answer(self, method: str, path: str, answer: Answer, times: int = 1) -> None:
        """The next `times` requests of this method, to a path with this end."""
        self._script.extend([(method, path, answer)] * times)

    def writes(self) -> list[tuple[str, str]]:
        return [(asked.method, asked.path) for asked in self.asked if asked.method != "GET"]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        asked = Asked(
            request.method,
            request.path,
            dict(request.query),
            json.loads(data) if data else None,
            request.content_type,
            request.headers.get("Authorization"),
        )
        self.asked.append(asked)
        answer = self._take(asked)
        await asyncio.sleep(answer.after_seconds)
        if answer.status == 0:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if answer.lines is not None:
            return await _stream(request, answer)
        if answer.text is not None:
            return web.Response(text=answer.text, status=answer.status, content_type="application/json")
        return web.json_response(answer.body, status=answer.status, headers=answer.headers)

    def _take(self, asked: Asked) -> Answer:
        for rule in self._script:
            method, path, answer = rule
            if asked.method == method and asked.path.endswith(path):
                self._script.remove(rule)
                return answer
        return Answer(body=self._echo(asked))

    def _echo(self, asked: Asked) -> Object:
        body: Object = dict(asked.body or {})
        metadata = {"name": asked.path.rsplit("/", 1)[-1], "namespace": "research"} | body.get("metadata", {})
        return body | {"metadata": metadata | {"resourceVersion": str(next(self._versions))}}


async def _stream(request: web.Request, answer: Answer) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for line in answer.lines or []:
        text = line if isinstance(line, str) else json.dumps(line)
        await response.write(text.encode() + b"\n")
    await asyncio.sleep(answer.open_seconds)
    return response


@asynccontextmanager
async def scripted_api_server(script: Callable[[ScriptedApiServer], None]) -> AsyncIterator[Serving]:
    server = ScriptedApiServer()
    script(server)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    async with TestServer(app) as listening, AsyncExitStack() as stack:
        url = str(listening.make_url("")).rstrip("/")
        configuration = Configuration(host=url, api_key={"BearerToken": "Bearer secret"})
        yield Serving(server, Connection(configuration, "operators"), stack)


@dataclass(frozen=True)
class Serving:
    server: ScriptedApiServer
    connection: Connection
    _stack: AsyncExitStack

    def client(self, **options: Any) -> ApiClient:
        """A client that sends each request once, unless `options` say otherwise. It is closed after the story."""
        given: dict[str, Any] = {"concurrency": 1, "retry": RetryPolicy(attempts=1)} | options
        client = ApiClient(self.connection, **given)
        self._stack.push_async_callback(client.close)
        return client

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Do this work in the background, until the story ends."""
        self._stack.callback(asyncio.create_task(work).cancel)


def nothing(_: ScriptedApiServer) -> None:
    """A script without special answers."""


Story = Callable[[Serving], Awaitable[None]]


def play(story: Story, script: Callable[[ScriptedApiServer], None] = nothing) -> ScriptedApiServer:
    """Run an asynchronous test against a server with this script; returns the server, with what it was asked."""

    async def run() -> ScriptedApiServer:
        async with scripted_api_server(script) as serving, asyncio.timeout(60):
            await story(serving)
            return serving.server

    return asyncio.run(run())
