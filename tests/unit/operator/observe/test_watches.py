"""Watches of the operator: kinds, namespaces and labels; a relist removes jobs that were deleted meanwhile."""

from __future__ import annotations

import asyncio

from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.resources import RLJOBS
from rljob_operator.kube.retry import RetryPolicy
from rljob_operator.observe.observer import Observer
from rljob_operator.observe.watches import OWN_OBJECTS, reflectors
from tests.unit.operator.kube.scripted_api_server import Answer, Object, ScriptedApiServer, Serving, play
from tests.unit.operator.observe.objects import job


def listing(version: int, *items: Object) -> Answer:
    return Answer(body={"items": list(items), "metadata": {"resourceVersion": str(version)}})


def test_each_namespace_has_a_watch_of_each_kind() -> None:
    async def story(serving: Serving) -> None:
        client = ApiClient(serving.connection, concurrency=1)
        observer = Observer((), lambda _: None)
        watches = reflectors(client, observer, ("a", "b"), watch_nodes=True)
        kinds = [(watch.resource.plural, watch.namespace, watch._label_selector) for watch in watches]
        assert kinds == [
            ("rljobs", "a", ""), ("pods", "a", OWN_OBJECTS), ("stepreports", "a", OWN_OBJECTS),
            ("rljobs", "b", ""), ("pods", "b", OWN_OBJECTS), ("stepreports", "b", OWN_OBJECTS),
            ("nodes", None, ""),
        ]  # fmt: skip
        everywhere = reflectors(client, observer, (), watch_nodes=False)
        assert [(watch.resource.plural, watch.namespace) for watch in everywhere] == [
            ("rljobs", None), ("pods", None), ("stepreports", None)
        ]  # fmt: skip
        await client.close()

    play(story)


def test_a_job_deleted_while_the_watch_was_down_is_removed() -> None:
    def script(server: ScriptedApiServer) -> None:
        expired: Object = {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}
        server.answer("GET", "/rljobs", listing(20, job("a"), job("b")))
        server.answer("GET", "/rljobs", Answer(lines=[expired]))
        server.answer("GET", "/rljobs", listing(30, job("b")))
        server.answer("GET", "/rljobs", Answer(lines=[], open_seconds=60))

    async def story(serving: Serving) -> None:
        observer = Observer((), lambda _: None)
        client = ApiClient(serving.connection, concurrency=2, retry=RetryPolicy(attempts=1))
        [watch] = [found for found in reflectors(client, observer, (), watch_nodes=False) if found.resource is RLJOBS]
        running = asyncio.create_task(watch.run())
        await watch.synced.wait()
        async with asyncio.timeout(60):
            while {name for (_, name), _ in observer.jobs.items()} != {"b"}:
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.close()

    play(story, script)
