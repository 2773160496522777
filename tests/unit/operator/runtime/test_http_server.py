"""A port that anybody may reach: callers who hold connections open keep nobody out."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import AsyncExitStack, suppress

import aiohttp
import pytest
from aiohttp import web

from rljob_operator.runtime import http_server
from rljob_operator.runtime.certificate import Certificate
from rljob_operator.runtime.http_server import MAX_CONNECTIONS, serve

CALLERS = 600


def application() -> web.Application:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_get("/", answer)
    return app


def unverified() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
def test_callers_who_send_nothing_keep_nobody_out(tls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_HANDSHAKE_SECONDS", 240.0)  # the machine may stop both sides for seconds

    async def story() -> None:
        async with AsyncExitStack() as stack:
            certificate = Certificate(None).context if tls else None
            port = await serve(stack, application(), 0, certificate, connections_per_second=1000)
            context = unverified() if tls else None
            idle = []
            for _ in range(CALLERS // 50):
                opened = (asyncio.open_connection("127.0.0.1", port, ssl=context) for _ in range(50))
                idle += await asyncio.gather(*opened)
            for _, writer in idle[-10:]:
                writer.write(b"GET / HTTP/1.1\r\nX-Never-Ending: ")
            async with aiohttp.ClientSession() as session:
                address = f"http{'s' if tls else ''}://127.0.0.1:{port}/"
                async with session.get(address, ssl=unverified(), timeout=aiohttp.ClientTimeout(240)) as answer:
                    assert answer.status == 200
            closed = 0
            for reader, _ in idle:
                with suppress(TimeoutError, OSError):
                    async with asyncio.timeout(0.001):
                        closed += not await reader.read(1)
            assert closed >= CALLERS - MAX_CONNECTIONS
            for _, writer in idle:
                writer.transport.abort()

    asyncio.run(story())


def test_requests_that_are_not_http_leave_no_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with AsyncExitStack() as stack:
            port = await serve(stack, application(), 0, connections_per_second=1000)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"\x16\x03\x01 not HTTP\r\n\r\n")
            assert b"400 Bad Request" in await reader.readline()
            writer.close()

    asyncio.run(story())
    assert caplog.records == []


def test_a_flood_of_new_connections_waits_its_turn() -> None:
    async def story() -> None:
        async with AsyncExitStack() as stack:
            port = await serve(stack, application(), 0, connections_per_second=20)
            began = asyncio.get_running_loop().time()
            opened = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port) for _ in range(15)))
            for _, writer in opened:
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            for reader, writer in opened:
                assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
                writer.transport.abort()
            assert asyncio.get_running_loop().time() - began > 0.5

    asyncio.run(story())
