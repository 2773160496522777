"""Requests to the API server: what is sent, what is tried again, what an answer becomes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rljob_operator.kube.client import PAGE, ApiClient
from rljob_operator.kube.errors import (
    AlreadyExists,
    ApiError,
    Conflict,
    Forbidden,
    Invalid,
    NamespaceTerminating,
    NotFound,
    Unavailable,
    WebhookFailed,
)
from rljob_operator.kube.resources import PODS, RLJOBS
from rljob_operator.kube.retry import RetryPolicy
from tests.unit.operator.kube.scripted_api_server import Answer, ScriptedApiServer, Serving, play, refusal

QUICK = RetryPolicy(attempts=3, first_seconds=0.001)


@asynccontextmanager
async def client(serving: Serving, **options: object) -> AsyncIterator[ApiClient]:
    made = ApiClient(serving.connection, **({"concurrency": 4, "retry": QUICK} | options))  # type: ignore[arg-type]
    try:
        yield made
    finally:
        await made.close()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (refusal(404, "NotFound"), NotFound),
        (refusal(409, "AlreadyExists"), AlreadyExists),
        (refusal(409, "Conflict"), Conflict),
        (refusal(403, "Forbidden"), Forbidden),
        (refusal(403, "Forbidden", causes=("NamespaceTerminating",)), NamespaceTerminating),
        (refusal(422, "Invalid"), Invalid),
        (refusal(400, "BadRequest"), Invalid),
    ],
)
def test_a_refusal_has_the_servers_message_and_is_not_retried(answer: Answer, expected: type[ApiError]) -> None:
    async def story(serving: Serving) -> None:
        async with client(serving) as api:
            with pytest.raises(ApiError, match=r"^no$") as caught:
                await api.create(PODS, {"kind": "Pod"}, "research")
            assert type(caught.value) is expected

    server = play(story, lambda server: server.answer("POST", "/pods", answer))
    assert len(server.asked) == 1


@pytest.mark.parametrize("answer", [refusal(429, "TooMany"), refusal(500, "Internal"), refusal(503, "x"), Answer(0)])
def test_overload_failure_and_silence_are_tried_again(answer: Answer) -> None:
    async def story(serving: Serving) -> None:
        async with client(serving) as api:
            assert (await api.create(PODS, {"kind": "Pod"}, "research"))["kind"] == "Pod"

    server = play(story, lambda server: server.answer("POST", "/pods", answer, times=2))
    assert server.writes() == [("POST", "/api/v1/namespaces/research/pods")] * 3


DENIED = 'admission webhook "budget.example" denied the request: no budget'
NO_WEBHOOK = 'Internal error occurred: failed calling webhook "mesh.example": failed to call webhook: Post: refused'


@pytest.mark.parametrize(
    ("answer", "expected", "tries"),
    [
        (refusal(400, "BadRequest", DENIED), Forbidden, 1),
        (refusal(404, "NotFound", DENIED), Forbidden, 1),
        (refusal(409, "AlreadyExists", DENIED), Forbidden, 1),
        (refusal(409, "Conflict", DENIED), Forbidden, 1),
        (refusal(429, "TooManyRequests", DENIED), Forbidden, 1),
        (refusal(500, "InternalError", DENIED), Forbidden, 1),
        (refusal(500, "InternalError", NO_WEBHOOK), WebhookFailed, QUICK.attempts),
    ],
)
def test_a_webhook_refuses_or_fails_whatever_the_code(answer: Answer, expected: type[ApiError], tries: int) -> None:
    async def story(serving: Serving) -> None:
        async with client(serving) as api:
            with pytest.raises(ApiError, match="webhook") as caught:
                await api.create(PODS, {"kind": "Pod"}, "research")
            assert type(caught.value) is expected

    server = play(story, lambda server: server.answer("POST", "/pods", answer, times=9))
    assert len(server.asked) == tries


def test_it_gives_up_after_so_many_tries() -> None:
    async def story(serving: Serving) -> None:
        async with client(serving) as api:
            with pytest.raises(Unavailable, match="no"):
                await api.get(PODS, "a", "research")

    server = play(story, lambda server: server.answer("GET", "/pods/a", refusal(500, "Internal"), times=9))
    assert len(server.asked) == QUICK.attempts


def test_the_server_says_how_long_to_wait() -> None:
    async def story(serving: Serving) -> None:
        began = time.monotonic()
        async with client(serving) as api:
            await api.get(PODS, "a", "research")
        assert time.monotonic() - began >= 1.0

    play(story, lambda server: server.answer("GET", "/pods/a", refusal(429, "TooMany", Retry_After="1")))


def test_a_server_that_does_not_answer_in_time_is_unavailable() -> None:
    async def story(serving: Serving) -> None:
        async with client(serving, timeout_seconds=0.05, retry=RetryPolicy(attempts=1)) as api:
            with pytest.raises(Unavailable, match="no answer from the API server"):
                await api.get(PODS, "a", "research")

    play(story, lambda server: server.answer("GET", "/pods/a", Answer(after_seconds=1.0)))


def test_an_answer_that_is_not_json_is_told_as_it_is() -> None:
    async def story(serving: Serving) -> None:
        async with client(serving) as api:
            with pytest.raises(Unavailable, match="out of service"):
                await api.get(PODS, "a", "research")

    play(story, lambda server: server.answer("GET", "/pods/a", Answer(502, "out of service"), times=3))


def test_apply_and_patch_say_who_writes_and_how() -> None:
    async def story(serving: Serving) -> None:
        async with client(serving) as api:
            config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": "research"}}
            await api.apply(config_map, "its-uid")
            await api.patch(RLJOBS, "a", {"status": {}}, "research", "status")

    applied, patched = play(story).asked
    assert (applied.method, applied.path) == ("PATCH", "/api/v1/namespaces/research/configmaps/a")
    assert applied.query == {"fieldManager": "rljob-operator", "force": "true"}
    assert applied.body["metadata"]["uid"] == "its-uid"
    assert applied.content_type == "application/apply-patch+yaml"
    assert patched.path == "/apis/rljob.dev/v1alpha1/namespaces/research/rljobs/a/status"
    assert patched.content_type == "application/merge-patch+json"
    assert applied.authorization == "Bearer secret"


def test_a_deletion_names_the_very_object() -> None:
    async def story(serving: Serving) -> None:
        async with client(serving) as api:
            await api.delete(PODS, "a", "research", uid="u1", grace_seconds=7)

    [deleted] = play(story).asked
    assert deleted.body == {"preconditions": {"uid": "u1"}, "gracePeriodSeconds": 7}


def test_lists_come_in_pages() -> None:
    def script(server: ScriptedApiServer) -> None:
        first = {"items": [{"metadata": {"name": "a"}}], "metadata": {"resourceVersion": "5", "continue": "more"}}
        second = {"items": [{"metadata": {"name": "b"}}], "metadata": {"resourceVersion": "5"}}
        server.answer("GET", "/pods", Answer(body=first))
        server.answer("GET", "/pods", Answer(body=second))

    async def story(serving: Serving) -> None:
        async with client(serving) as api:
            pages = [page async for page in api.list_pages(PODS, None, "a=b")]
            assert [([pod["metadata"]["name"] for pod in pods], version) for pods, version in pages] == [
                (["a"], "5"),
                (["b"], "5"),
            ]

    asked = play(story, script).asked
    assert [request.query.get("continue") for request in asked] == [None, "more"]
    assert all(request.query["limit"] == str(PAGE) and request.query["labelSelector"] == "a=b" for request in asked)


def test_pages_of_large_objects_have_few_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 8 MiB of a page are read; here 2 kB. Pages grow again when the objects are small."""
    monkeypatch.setattr("rljob_operator.kube.client._LARGEST_PAGE_BYTES", 2000)

    def page(*sizes: int, more: str = "") -> Answer:
        items = [{"metadata": {"name": f"of-{size}"}, "text": "x" * size} for size in sizes]
        return Answer(body={"items": items, "metadata": {"resourceVersion": "5", "continue": more}})

    def script(server: ScriptedApiServer) -> None:
        for answer in (page(*[1500] * 100), page(*[1500] * 25), page(*[1500] * 6), page(5000, more="b"),
                       page(5, 6, more="c"), page(7, 8, 9)):  # fmt: skip
            server.answer("GET", "/pods", answer)

    async def story(serving: Serving) -> None:
        async with client(serving) as api:
            names = [pod["metadata"]["name"] async for pods, _ in api.list_pages(PODS) for pod in pods]
            assert names == ["of-5000", "of-5", "of-6", "of-7", "of-8", "of-9"]

    asked = play(story, script).asked
    assert [(request.query["limit"], request.query.get("continue")) for request in asked] == [
        ("100", None),
        ("25", None),
        ("6", None),
        ("1", None),
        ("2", "b"),
        ("4", "c"),
    ]


def test_never_more_requests_at_once_than_allowed() -> None:
    async def story(serving: Serving) -> None:
        async with client(serving, concurrency=2) as api:
            began = time.monotonic()
            await asyncio.gather(*(api.get(PODS, "a", "research") for _ in range(6)))
            assert time.monotonic() - began >= 3 * 0.05

    play(story, lambda server: server.answer("GET", "/pods/a", Answer(body={}, after_seconds=0.05), times=6))


def test_a_guard_stops_writes_and_lets_reads_pass() -> None:
    def guard() -> None:
        raise PermissionError

    async def story(serving: Serving) -> None:
        async with client(serving, guard=guard) as api:
            await api.get(PODS, "a", "research")
            with pytest.raises(PermissionError):
                await api.create(PODS, {"kind": "Pod"}, "research")

    assert play(story).writes() == []
