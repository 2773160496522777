"""RLJobs from kopf: what kopf does not tell is found by listing, and its silence is noticed."""

from __future__ import annotations

import asyncio
import time

from yarl import URL

from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.retry import RetryPolicy
from rljob_operator.observe.job_feed import JobFeed
from rljob_operator.observe.observer import Observer
from tests.unit.operator.kube.scripted_api_server import Answer, Object, ScriptedApiServer, Serving, play
from tests.unit.operator.observe.objects import job

ALL = "https://api/apis/rljob.dev/v1alpha1/rljobs"


def listing(version: int, *items: Object) -> Answer:
    return Answer(body={"items": list(items), "metadata": {"resourceVersion": str(version)}})


def test_a_job_that_was_deleted_while_kopf_did_not_look_goes_when_kopf_lists_again() -> None:
    def script(server: ScriptedApiServer) -> None:
        server.answer("GET", "/rljobs", listing(20, job("a"), job("b")))
        server.answer("GET", "/rljobs", listing(30, job("b")))

    async def story(serving: Serving) -> None:
        observer = Observer((), lambda _: None)
        client = ApiClient(serving.connection, concurrency=1, retry=RetryPolicy(attempts=1))
        feed = JobFeed(client, observer.jobs, ())
        running = asyncio.create_task(feed.run())
        await feed.synced.wait()
        assert {name for (_, name), _ in observer.jobs.items()} == {"a", "b"}
        feed.on_answer(URL(f"{ALL}?watch=true"), 200)
        await asyncio.sleep(0.05)
        assert len(serving.server.asked) == 1, "a watch that goes on is no reason to list"
        feed.on_answer(URL(ALL), 200)
        while len(observer.jobs) > 1:
            await asyncio.sleep(0.01)
        running.cancel()
        await client.close()

    play(story, script)


def test_kopfs_events_reach_the_cache() -> None:
    async def story(serving: Serving) -> None:
        observer = Observer((), lambda _: None)
        client = ApiClient(serving.connection, concurrency=1)
        feed = JobFeed(client, observer.jobs, ())
        feed.on_event({"type": None, "object": job("listed", 5)})
        feed.on_event({"type": "ADDED", "object": job("added", 6)})
        feed.on_event({"type": "DELETED", "object": job("listed", 7)})
        assert {name for (_, name), _ in observer.jobs.items()} == {"added"}
        await client.close()

    play(story)


def test_the_quietest_namespace_tells_how_old_the_news_are() -> None:
    async def story(serving: Serving) -> None:
        client = ApiClient(serving.connection, concurrency=1)
        feed = JobFeed(client, Observer((), lambda _: None).jobs, ("a", "b"))
        await asyncio.sleep(0.1)
        answered = time.monotonic()
        of_a = URL("https://api/apis/rljob.dev/v1alpha1/namespaces/a/rljobs?watch=true")
        feed.on_answer(of_a, 200)
        assert feed.age_seconds >= 0.1
        feed.on_answer(URL(str(of_a).replace("/a/", "/b/")), 500)
        assert feed.age_seconds >= 0.1, "a refusal is no sign of life of the watch"
        feed.on_answer(URL(str(of_a).replace("/a/", "/b/")), 200)
        assert feed.age_seconds <= time.monotonic() - answered
        await client.close()

    play(story)
