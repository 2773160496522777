"""List and watch: the sink ends up with what the API server holds, whatever happens to the stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

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
    script: Callable[[ScriptedApiServer], None],
    expected: set[str],
    inactivity_seconds: float = 60.0,
    sink: Names | None = None,
) -> ScriptedApiServer:
    """Watch until the sink holds just the expected pods."""

    sink = sink or Names()

    async def story(serving: Serving) -> None:
        api = ApiClient(serving.connection, concurrency=2, retry=RetryPolicy(attempts=1))
        reflector = Reflector(
            api, PODS, sink, label_selector="a=b", inactivity_seconds=inactivity_seconds, reconnect_seconds=0.01
        )
        running = asyncio.create_task(reflector.run())
        while sink.names != expected:
            await asyncio.sleep(0.01)
        assert reflector.synced.is_set()
        assert reflector.age_seconds < 60.0
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await api.close()

    return play(story, script)


def test_what_is_listed_is_added_to_and_removed_from() -> None:
    def script(server: ScriptedApiServer) -> None:
        server.answer("GET", "/pods", listing(5, "a", "b"))
        server.answer("GET", "/pods", stream(("ADDED", pod("c", 6)), ("DELETED", pod("a", 7)), open_seconds=60))

    server = watched(script, {"b", "c"})
    assert server.asked[1].query["resourceVersion"] == "5"
    assert server.asked[1].query["labelSelector"] == "a=b"
    assert server.asked[1].query["allowWatchBookmarks"] == "true"


def test_an_ended_stream_resumes_at_the_last_revision_or_bookmark() -> None:
    def script(server: ScriptedApiServer) -> None:
        server.answer("GET", "/pods", listing(5, "a"))
        server.answer("GET", "/pods", stream(("BOOKMARK", {"metadata": {"resourceVersion": "90"}})))
        server.answer("GET", "/pods", stream(("ADDED", pod("c", 91)), open_seconds=60))

    server = watched(script, {"a", "c"})
    assert server.asked[2].query["resourceVersion"] == "90"


def test_an_expired_revision_lists_again_and_drops_vanished_objects() -> None:
    gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}

    def script(server: ScriptedApiServer) -> None:
        server.answer("GET", "/pods", listing(5, "a", "b"))
        server.answer("GET", "/pods", stream(("ERROR", gone)))
        server.answer("GET", "/pods", listing(50, "b"))
        server.answer("GET", "/pods", stream(open_seconds=60))

    watched(script, {"b"})


def test_a_silent_stream_is_given_up() -> None:
    def script(server: ScriptedApiServer) -> None:
        server.answer("GET", "/pods", listing(5, "a"))
        server.answer("GET", "/pods", stream(open_seconds=60))
        # Again and again, as an API server does: a busy machine may be silent for longer than the limit.
        server.answer("GET", "/pods", stream(("ADDED", pod("b", 6)), open_seconds=60), times=100)

    watched(script, {"a", "b"}, inactivity_seconds=0.1)


def test_errors_of_listing_and_watching_are_outlived() -> None:
    def script(server: ScriptedApiServer) -> None:
        server.answer("GET", "/pods", refusal(500, "Internal"))
        server.answer("GET", "/pods", listing(5, "a"))
        server.answer("GET", "/pods", Answer(0))
        server.answer("GET", "/pods", stream(("ADDED", pod("b", 6)), open_seconds=60))

    watched(script, {"a", "b"})


def test_objects_may_be_longer_than_any_buffer() -> None:
    long = pod("long", 6) | {"spec": "x" * 3_000_000}

    def script(server: ScriptedApiServer) -> None:
        server.answer("GET", "/pods", listing(5))
        server.answer("GET", "/pods", stream(("ADDED", long), ("ADDED", pod("b", 7)), open_seconds=60))

    watched(script, {"long", "b"})


def deep_text(answer: Object) -> str:
    """JSON of the answer with `DEEP` replaced by an object that Python's json module cannot decode."""
    return json.dumps(answer).replace('"DEEP"', '{"a":' * 1200 + "1" + "}" * 1200)


def test_a_deeply_nested_object_in_a_page_is_kept_without_its_depths() -> None:
    def script(server: ScriptedApiServer) -> None:
        body = {"items": [pod("a", 5) | {"spec": "DEEP"}, pod("b", 5)], "metadata": {"resourceVersion": "5"}}
        server.answer("GET", "/pods", Answer(text=deep_text(body)))
        server.answer("GET", "/pods", stream(("ADDED", pod("c", 6)), open_seconds=60))

    watched(script, {"a", "b", "c"})


def test_a_deeply_nested_object_in_a_watch_event_stops_no_other_event() -> None:
    def script(server: ScriptedApiServer) -> None:
        server.answer("GET", "/pods", listing(5, "a"))
        deep = deep_text({"type": "ADDED", "object": pod("b", 6) | {"spec": "DEEP"}})
        server.answer("GET", "/pods", Answer(lines=[deep, {"type": "ADDED", "object": pod("c", 7)}], open_seconds=60))

    server = watched(script, {"a", "b", "c"})
    assert len(server.asked) == 2


class Picky(Names):
    """A sink with a bug: it cannot take the pod `bad`."""

    def put(self, obj: Object) -> None:
        if obj["metadata"]["name"] == "bad":
            raise TypeError("a bug")
        super().put(obj)


def test_an_object_that_the_sink_cannot_take_stops_no_other_object() -> None:
    def script(server: ScriptedApiServer) -> None:
        server.answer("GET", "/pods", listing(5, "bad", "a"))
        server.answer("GET", "/pods", stream(("MODIFIED", pod("bad", 6)), ("ADDED", pod("b", 7)), open_seconds=60))

    server = watched(script, {"a", "b"}, sink=Picky())
    assert len(server.asked) == 2


@pytest.mark.parametrize("event", [{}, [], 5, {"type": "ADDED"}, {"type": "ERROR", "object": 7}, "not JSON"])
def test_an_event_of_no_known_form_means_listing_again(event: Any) -> None:
    def script(server: ScriptedApiServer) -> None:
        server.answer("GET", "/pods", listing(5, "a"))
        server.answer("GET", "/pods", Answer(lines=[event], open_seconds=0.1))
        server.answer("GET", "/pods", listing(50, "a", "b"))
        server.answer("GET", "/pods", stream(open_seconds=60))

    watched(script, {"a", "b"})


@pytest.mark.parametrize("page", ["<html>gateway</html>", "[]", "7"])
def test_a_page_that_is_no_list_removes_nothing(page: str) -> None:
    def script(server: ScriptedApiServer) -> None:
        server.answer("GET", "/pods", Answer(text=page))
        server.answer("GET", "/pods", listing(5, "a"))
        server.answer("GET", "/pods", stream(open_seconds=60))

    server = watched(script, {"a"})
    assert "watch" not in server.asked[1].query
