"""List and watch: the sink ends up with what the API server holds, whatever happens to the stream."""

from __future__ import annotations

import asyncio
import json

import pytest

from rljob_operator.kube.resources import PODS
from rljob_operator.kube.watch import Key, Reflector, key_of
from tests.unit.operator.kube.scripted_api_server import (
    Answer,
    Asked,
    Object,
    ScriptedApiServer,
    Serving,
    play,
    refusal,
)


class Names:
    """A sink that keeps names. It has a bug: it cannot take the pod `bad`."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def put(self, obj: Object) -> None:
        if obj["metadata"]["name"] == "bad":
            raise TypeError("a bug")
        self.names.add(key_of(obj)[1])

    def remove(self, obj: Object) -> None:
        self.names.discard(key_of(obj)[1])

    def keep_only(self, keys: set[Key], resource_version: str, namespace: str | None) -> None:
        self.names &= {name for _, name in keys}


def pod(name: str, version: int = 6) -> Object:
    return {"metadata": {"namespace": "research", "name": name, "resourceVersion": str(version)}}


def listing(version: int, *names: str) -> Answer:
    return Answer(body={"items": [pod(name, version) for name in names], "metadata": {"resourceVersion": str(version)}})


def added(name: str, **fields: object) -> Object:
    return {"type": "ADDED", "object": pod(name) | fields}


def stream(*events: object, open_seconds: float = 60) -> Answer:
    return Answer(lines=list(events), open_seconds=open_seconds)


def deep(answer: object) -> str:
    """JSON of the answer with `DEEP` replaced by an object that Python's json module cannot decode."""
    return json.dumps(answer).replace('"DEEP"', '{"a":' * 1200 + "1" + "}" * 1200)


def watched(expected: set[str], *answers: Answer, inactivity_seconds: float = 60.0) -> list[Asked]:
    """Watch until the sink holds just the expected pods."""
    sink = Names()

    def script(server: ScriptedApiServer) -> None:
        for answer in answers:
            server.answer("GET", "/pods", answer)

    async def story(serving: Serving) -> None:
        api = serving.client(concurrency=2)
        reflector = Reflector(
            api, PODS, sink, label_selector="a=b", inactivity_seconds=inactivity_seconds, reconnect_seconds=0.01
        )
        serving.run(reflector.run())
        while sink.names != expected:
            await asyncio.sleep(0.01)
        assert reflector.synced.is_set()
        assert reflector.age_seconds < 60.0

    return play(story, script).asked


def test_what_is_listed_is_added_to_and_removed_from() -> None:
    changes = stream(added("c"), {"type": "DELETED", "object": pod("a", 7)})
    asked = watched({"b", "c"}, listing(5, "a", "b"), changes)
    assert asked[1].query.items() >= {
        ("resourceVersion", "5"),
        ("labelSelector", "a=b"),
        ("allowWatchBookmarks", "true"),
    }


def test_an_ended_stream_resumes_at_the_last_revision_or_bookmark() -> None:
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "90"}}}
    asked = watched({"a", "c"}, listing(5, "a"), stream(bookmark, open_seconds=0), stream(added("c")))
    assert asked[2].query["resourceVersion"] == "90"


UNKNOWN: list[object] = [{}, [], 5, {"type": "ADDED"}, {"type": "ERROR", "object": 7}, "not JSON"]
TWO_TRIES = [Answer(0)] * 2
"""aiohttp repeats a request whose connection was closed."""
EXPIRED = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
DEEP_PAGE = {"items": [pod("a") | {"spec": "DEEP"}, pod("b")], "metadata": {"resourceVersion": "5"}}


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        pytest.param(
            [listing(5, "a", "b"), stream({"type": "ERROR", "object": EXPIRED}), listing(50, "b"), stream()],
            {"b"},
            id="an expired revision: objects that vanished are dropped",
        ),
        pytest.param(
            [refusal(500, "Internal"), listing(5, "a"), *TWO_TRIES, stream(added("b"))],
            {"a", "b"},
            id="errors of listing and watching",
        ),
        pytest.param(
            [listing(5), stream(added("long", spec="x" * 3_000_000), added("b"))],
            {"long", "b"},
            id="an object that is longer than any buffer",
        ),
        pytest.param(
            [Answer(text=deep(DEEP_PAGE)), stream(deep(added("c", spec="DEEP")), added("d"))],
            {"a", "b", "c", "d"},
            id="deeply nested objects in a page and in an event",
        ),
        pytest.param(
            [listing(5, "bad", "a"), stream(added("bad"), added("b"))],
            {"a", "b"},
            id="an object that the sink cannot take",
        ),
        *[
            pytest.param(
                [listing(5, "a"), stream(event, open_seconds=0.1), listing(50, "a", "b"), stream()],
                {"a", "b"},
                id=f"an event of no known form: {event}",
            )
            for event in UNKNOWN
        ],
        *[
            pytest.param([Answer(text=page), listing(5, "a"), stream()], {"a"}, id=f"a page that is no list: {page}")
            for page in ("<html>gateway</html>", "[]", "7")
        ],
    ],
)
def test_the_sink_gets_everything_in_spite_of(answers: list[Answer], expected: set[str]) -> None:
    assert len(watched(expected, *answers)) <= len(answers)


def test_a_silent_stream_is_given_up() -> None:
    # Again and again, as an API server does: a busy machine may be silent for longer than the limit.
    watched({"a", "b"}, listing(5, "a"), stream(), *[stream(added("b"))] * 100, inactivity_seconds=0.1)
