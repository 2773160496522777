"""Kopf as the runtime of the process: login, start-up and clean-up, signals; the place for admission webhooks.

RLJobs are watched by `kube.watch.Reflector`, as pods and StepReports are. Decisions need a complete cache, and kopf's
watch (1.45.2, `kopf/_cogs/clients/watching.py` and `kopf/_core/reactor/queueing.py`) cannot fill one:

- It reports no deletion that happened while its watch was down. After a 410 it lists again and sends an event of type
  None for each object that exists; indexes and memories keep the others.
- It does not report the end of a listing: `Bookmark.LISTED` stays inside the watcher, and no handler is called for an
  empty cluster.
- A watch that goes silent and an error event other than 410 are handled without the application: its health checks
  cannot see the first, and the second ends the process.

With kopf's watch each listing had to be repeated by the operator itself, and each RLJob was decoded twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import kopf

from rljob_operator.kube.connection import Connection

_RETRY_SECONDS = (0.5, 1.0, 2.0, 5.0, *[10.0] * 1000)
"""Waits between kopf's attempts to read the API's discovery. Kopf ends the process after the last one."""


async def run_in_kopf(
    connection: Connection, *, start: Callable[[], None], stop: Callable[[], Awaitable[None]], stop_flag: asyncio.Event
) -> None:
    """Call `start`, wait for a signal or for `stop_flag`, then call `stop`.

    Background tasks that `start` creates must have ended when `stop` returns: kopf cancels the others.
    """
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def log_in(**_: Any) -> kopf.AiohttpSession:
        return kopf.AiohttpSession(server=connection.server, aiohttp_session=connection.session(connections=0))

    @kopf.on.startup(registry=registry)
    async def started(**_: Any) -> None:
        start()

    @kopf.on.cleanup(registry=registry)
    async def stopped(**_: Any) -> None:
        await stop()

    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.networking.error_backoffs = _RETRY_SECONDS
    await kopf.operator(registry=registry, settings=settings, standalone=True, clusterwide=True, stop_flag=stop_flag)
