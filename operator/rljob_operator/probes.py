"""/healthz and /readyz, for the kubelet."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Protocol

from aiohttp import web

from rljob_operator.kube.resources import Resource
from rljob_operator.metrics import WATCH_AGE_SECONDS


class Watched(Protocol):
    """Something that keeps a cache fresh."""

    resource: Resource

    @property
    def age_seconds(self) -> float:
        """Time since the API server was last heard."""


class Health:
    """What the probes say. Nothing is watched until `watching` is called: a replica that stands by is healthy."""

    def __init__(self, stale_watch_seconds: float) -> None:
        self._stale_watch_seconds = stale_watch_seconds
        self._watches: tuple[Watched, ...] = ()
        self.ready = False
        """The operator leads with full caches, or knows that another replica leads."""

    def standing_by(self) -> None:
        """Another replica leads."""
        self.ready = True

    def watching(self, watches: Iterable[Watched]) -> None:
        """From now on these watches must be heard."""
        self._watches = tuple(watches)
        for watched in self._watches:
            WATCH_AGE_SECONDS.labels(watched.resource.plural).set_function(partial(self._age, watched.resource))

    def problem(self) -> str | None:
        """Why the process should be replaced, in a sentence; None: it is well."""
        for watched in self._watches:
            if watched.age_seconds > self._stale_watch_seconds:
                return (
                    f"nothing was heard on the watch of {watched.resource.plural} for {watched.age_seconds:.0f} s, "
                    f"at most {self._stale_watch_seconds:.0f} s are expected"
                )
        return None

    def _age(self, resource: Resource) -> float:
        return max(watched.age_seconds for watched in self._watches if watched.resource is resource)


def probes_app(health: Health) -> web.Application:
    """Both probes. That they answer at all shows that the event loop runs."""

    async def healthz(_: web.Request) -> web.Response:
        return _answer(health.problem())

    async def readyz(_: web.Request) -> web.Response:
        return _answer(None if health.ready else "neither are the caches filled nor is another replica known to lead")

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    return app


def _answer(problem: str | None) -> web.Response:
    return web.Response(status=503, text=f"{problem}\n") if problem else web.Response(text="ok\n")
