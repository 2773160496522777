"""Kopf as the operator's shell: it logs in, watches RLJobs, takes the signals. It neither decides nor writes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import kopf

from rljob_api.names import GROUP, VERSION
from rljob_operator.kube.client import PAGE
from rljob_operator.kube.connection import Connection
from rljob_operator.observe.job_feed import JobFeed

_WATCH_SECONDS = 100
"""Kopf's watches are renewed so often: each renewal shows that they live."""
_RETRY_SECONDS = (0.5, 1.0, 2.0, 5.0, *[10.0] * 1000)
"""Kopf ends the process when it has used these up: an API server may be away for hours."""


async def run_kopf(
    connection: Connection,
    feed: JobFeed,
    namespaces: tuple[str, ...],
    *,
    start: Callable[[], None],
    stop: Callable[[], Awaitable[None]],
    stop_flag: asyncio.Event,
) -> None:
    """Until a signal, or until `stop_flag` is set. `start` is called before kopf watches, `stop` when it has stopped.

    `namespaces` empty: all. What `start` puts into the background must have ended when `stop` returns: kopf cancels it.
    """
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def log_in(**_: Any) -> kopf.AiohttpSession:
        session = connection.session(connections=0, on_answer=feed.on_answer)
        return kopf.AiohttpSession(server=connection.server, aiohttp_session=session)

    @kopf.on.startup(registry=registry)
    async def started(**_: Any) -> None:
        start()

    @kopf.on.event(GROUP, VERSION, "rljobs", registry=registry)
    async def changed(event: Any, **_: Any) -> None:
        feed.on_event(event)

    @kopf.on.cleanup(registry=registry)
    async def stopped(**_: Any) -> None:
        await stop()

    await kopf.operator(
        registry=registry,
        settings=_settings(),
        standalone=True,
        clusterwide=not namespaces,
        namespaces=namespaces,
        stop_flag=stop_flag,
    )


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.server_timeout = _WATCH_SECONDS
    settings.watching.chunk_size = PAGE
    settings.networking.error_backoffs = _RETRY_SECONDS
    settings.persistence.diffbase_storage = _NoDiffs()
    settings.queueing.idle_timeout = 1.0
    return settings


class _NoDiffs(kopf.DiffBaseStorage):
    """Kopf compares each object with the one before, for handlers that there are none of here."""

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        pass
