"""List and watch: the sink ends up with what the API server holds, whatever happens to the stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.resources import PODS
from rljob_operator.kube.retry import RetryPolicy
from rljob_operator.kube.watch import Key, Reflector, key_of
from tests.unit.operator.kube.scripted_api_server import Answer, Object, ScriptedApiServer, Serving, play, refusal


class Names:
    """A sink that keeps names."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def put(self, obj: Object) -> None:
        self.names.add(key_of(obj)[1])

    def remove(self, obj: Object) -> None:
        self.names.discard(key_of(obj)[1])

    def keep_only(self, keys: set[Key], resource_version: str, namespace: str | None) -> None:
        self.names &= {name for _, name in keys}


def pod(name: str, version: int) -> Object:
    return {"metadata": {"namespace": "research", "name": name, "resourceVersion": str(version)}}


def listing(version: int, *names: str) -> Answer:
    return Answer(body={"items": [pod(name, version) for name in names], "metadata": {"resourceVersion": str(version)}})


def stream(*events: tuple[str, Object], open_seconds: float = 0.0) -> Answer:
    return Answer(lines=[{"type": kind, "object": obj} for kind, obj in events], open_seconds=open_seconds)


def watched(
    script: Callable[[ScriptedApiServer], None], expected: set[str], inactivity_seconds: float = 5.0
) -> ScriptedApiServer:
    """Watch until the sink holds just the expected pods."""

    async def story(serving: Serving) -> None:
        sink = Names()
        api = ApiClient(serving.connection, concurrency=2, retry=RetryPolicy(attempts=1))
        reflector = Reflector(
            api, PODS, sink, label_selector="a=b", inactivity_seconds=inactivity_seconds, reconnect_seconds=0.01
        )
        running = asyncio.create_task(reflector.run())
        while sink.names != expected:
            await asyncio.sleep(0.01)
        assert reflector.synced.is_set()
        assert reflector.age_seconds < 5.0
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await api.close()

    return play(story, script)


def test_what_is_listed_is_added_to_and_removed_from() -> None:
    def script(server: ScriptedApiServer) -> None:
        server.answer("GET", "/pods", listing(5, "a", "b"))
        server.answer("GET", "/pods", stream(("ADDED", pod("c", 6)), ("DELETED", pod("a", 7)), open_seconds=5))

    server = watched(script, {"b", "c"})
    assert server.asked[1].query["resourceVersion"] == "5"
    assert server.asked[1].query["labelSelector"] == "a=b"
    assert server.asked[1].query["allowWatchBookmarks"] == "true"


def test_a_stream_that_ends_is_taken_up_at_the_last_revision_seen_bookmarks_included() -> None:
    def script(server: ScriptedApiServer) -> None:
        server.answer("GET", "/pods", listing(5, "a"))
        server.answer("GET", "/pods", stream(("BOOKMARK", {"metadata": {"resourceVersion": "90"}})))
        server.answer("GET", "/pods", stream(("ADDED", pod("c", 91)), open_seconds=5))

    server = watched(script, {"a", "c"})
    assert server.asked[2].query["resourceVersion"] == "90"


def test_a_revision_that_is_too_old_means_listing_again_and_what_vanished_meanwhile_goes() -> None:
    gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}

    def script(server: ScriptedApiServer) -> None:
        server.answer("GET", "/pods", listing(5, "a", "b"))
        server.answer("GET", "/pods", stream(("ERROR", gone)))
        server.answer("GET", "/pods", listing(50, "b"))
        server.answer("GET", "/pods", stream(open_seconds=5))

    watched(script, {"b"})


def test_a_silent_stream_is_given_up() -> None:
    def script(server: ScriptedApiServer) -> None:
        server.answer("GET", "/pods", listing(5, "a"))
        server.answer("GET", "/pods", stream(open_seconds=60))
        server.answer("GET", "/pods", stream(("ADDED", pod("b", 6)), open_seconds=5))

    watched(script, {"a", "b"}, inactivity_seconds=0.1)


def test_errors_of_listing_and_watching_are_outlived() -> None:
    def script(server: ScriptedApiServer) -> None:
        server.answer("GET", "/pods", refusal(500, "Internal"))
        server.answer("GET", "/pods", listing(5, "a"))
        server.answer("GET", "/pods", Answer(0))
        server.answer("GET", "/pods", stream(("ADDED", pod("b", 6)), open_seconds=5))

    watched(script, {"a", "b"})


def test_objects_may_be_longer_than_any_buffer() -> None:
    long = pod("long", 6) | {"spec": "x" * 3_000_000}

    def script(server: ScriptedApiServer) -> None:
        server.answer("GET", "/pods", listing(5))
        server.answer("GET", "/pods", stream(("ADDED", long), ("ADDED", pod("b", 7)), open_seconds=5))

    watched(script, {"long", "b"})
