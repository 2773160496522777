"""A namespace that cannot be watched stops no other namespace."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.connection import Connection
from rljob_operator.kube.watch import Reflector
from rljob_operator.metrics import WATCH_AGE_SECONDS
from rljob_operator.observe.observer import Observer
from rljob_operator.observe.watches import Attendance, reflectors
from rljob_operator.runtime.endpoints import Health

LOST = {"kind": "Status", "code": 403, "reason": "Forbidden", "message": 'pods is forbidden in "team-b"'}


class Cluster:
    """Two namespaces without objects; requests about those in `lost` are refused."""

    def __init__(self, lost: set[str]) -> None:
        self.lost = lost
        self.attended = list[str | None]()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if any(f"/namespaces/{namespace}/" in request.path for namespace in self.lost):
            return web.json_response(LOST, status=403)
        if "watch" in request.query:
            await asyncio.sleep(0.1)
        return web.json_response({"metadata": {"resourceVersion": "5"}, "items": []})

    async def watch(self, story: Any) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        async with TestServer(app) as server:
            url = str(server.make_url("")).rstrip("/")
            client = ApiClient(Connection(url, "operators", ssl.create_default_context(), lambda: {}), concurrency=16)
            observer = Observer((), lambda _: None)
            watches = reflectors(client, observer, ("team-a", "team-b"), watch_nodes=False)
            for watch in watches:
                watch._reconnect_seconds = 0.01
            attendance = Attendance(watches, self.attended.append)
            tasks = [asyncio.create_task(watch.run()) for watch in watches]
            async with asyncio.timeout(240):
                await story(watches, attendance)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await client.close()


def test_the_other_namespaces_are_attended() -> None:
    async def story(watches: list[Reflector], attendance: Attendance) -> None:
        for watch in watches:
            await watch.settled.wait()
        assert (attendance.includes("team-a"), attendance.includes("team-b")) == (True, False)
        health = Health(stale_watch_seconds=600.0)
        health.watching(watches)
        for watch in watches:
            if watch.namespace == "team-b":
                watch._heard_at -= 700.0
        assert health.problem() is None
        WATCH_AGE_SECONDS.clear()  # its functions would outlive the test

    cluster = Cluster({"team-b"})
    asyncio.run(cluster.watch(story))
    assert cluster.attended == ["team-a"]


def test_a_namespace_that_is_lost_and_comes_back_is_attended_again() -> None:
    async def story(watches: list[Reflector], attendance: Attendance) -> None:
        for attended in (True, False, True):
            cluster.lost = set() if attended else {"team-b"}
            while attendance.includes("team-b") != attended or not attendance.includes("team-a"):
                await asyncio.sleep(0.01)

    cluster = Cluster(set())
    asyncio.run(cluster.watch(story))
    assert sorted(cluster.attended, key=str) == ["team-a", "team-b", "team-b"]
