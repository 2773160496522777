"""Serves an application on a port that anybody may reach: the number of connections, and of new ones, is bounded."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from contextlib import AsyncExitStack, suppress
from typing import TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

_T = TypeVar("_T")

MAX_CONNECTIONS = 64
"""On one port; of TLS, as many handshakes again. A further one closes the oldest, so that callers who hold theirs open
keep nobody out. asyncio has a buffer of 256 KiB for each TLS connection."""

_HANDSHAKE_SECONDS = 5.0
_LINGERING_SECONDS = 1.0
_BACKLOG_SECONDS = 1.5
"""A caller waits about this long for its turn while others flood the port."""

_LOGGER = logging.getLogger(__name__)


def _is_own_mistake(record: logging.LogRecord) -> bool:
    """False for requests that are not HTTP: anybody could fill the log with them."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_LOGGER.addFilter(_is_own_mistake)


async def serve(
    stack: AsyncExitStack,
    app: web.Application,
    port: int,
    tls: ssl.SSLContext | None = None,
    *,
    connections_per_second: int,
) -> int:
    """Serve until the stack is left. Returns the port. `connections_per_second`: a limit on new connections, whose
    handshakes would otherwise take the time of the process."""
    runner = web.AppRunner(
        app,
        handle_signals=False,
        access_log=None,
        shutdown_timeout=1.0,
        lingering_time=_LINGERING_SECONDS,
        logger=_LOGGER,
    )
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    assert runner.server is not None
    both = socket.has_dualstack_ipv6()
    listening = socket.create_server(
        ("", port),
        family=socket.AF_INET6 if both else socket.AF_INET,
        dualstack_ipv6=both,
        backlog=int(connections_per_second * _BACKLOG_SECONDS),
    )
    listening.setblocking(False)
    stack.callback(listening.close)
    doorman = _Doorman(runner.server, tls)
    accepting = asyncio.create_task(doorman.accept(listening, 1.0 / connections_per_second))
    stack.callback(accepting.cancel)
    return int(listening.getsockname()[1])


class _Doorman:
    """Accepts connections, one at a time."""

    def __init__(self, requests: web.Server, tls: ssl.SSLContext | None) -> None:
        self._requests = requests
        self._tls = tls
        self._handshakes: dict[asyncio.Task[None], None] = {}

    async def accept(self, listening: socket.socket, pause_seconds: float) -> None:
        """Accept until cancelled, with a pause after each connection."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError:  # the caller has left, or the process has no file descriptors at the moment
                await asyncio.sleep(0.1)
                continue
            self._close_oldest()
            handshake = asyncio.create_task(self._attend(connection))
            self._handshakes[handshake] = None
            handshake.add_done_callback(lambda ended: self._handshakes.pop(ended, None))
            await asyncio.sleep(pause_seconds)

    def _close_oldest(self) -> None:
        for connection in _oldest(self._requests.connections):
            connection.force_close()
        for handshake in _oldest([*self._handshakes]):
            handshake.cancel()

    async def _attend(self, connection: socket.socket) -> None:
        timeout = _HANDSHAKE_SECONDS if self._tls else None
        with suppress(OSError, TimeoutError):  # OSError includes ssl.SSLError
            await asyncio.get_running_loop().connect_accepted_socket(
                self._requests, connection, ssl=self._tls, ssl_handshake_timeout=timeout
            )


def _oldest(connections: list[_T]) -> list[_T]:
    """Those that must go so that one more is not too many."""
    return connections[: max(0, len(connections) + 1 - MAX_CONNECTIONS)]
