"""Requests to the API server: what is sent, what is tried again, what an answer becomes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

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
    RetryPolicy,
    Unavailable,
    WebhookFailed,
)
from rljob_operator.kube.resources import PODS, RLJOBS
from rljob_operator.runtime.discovery import api_server_ports
from tests.unit.operator.kube.scripted_api_server import Answer, Asked, ScriptedApiServer, Serving, play, refusal

QUICK = RetryPolicy(attempts=3, first_seconds=0.001)

Request = Callable[[ApiClient], Awaitable[Any]]


def sent(request: Request, *answers: Answer, method: str = "GET", **options: Any) -> list[Asked]:
    """The requests that the API server receives. It returns `answers` in order, and then echoes."""

    def script(server: ScriptedApiServer) -> None:
        for answer in answers:
            server.answer(method, "", answer)

    async def story(serving: Serving) -> None:
        await request(serving.client(**{"concurrency": 4, "retry": QUICK} | options))

    return play(story, script).asked


async def get(api: ApiClient) -> None:
    await api.get(PODS, "a", "research")


async def create(api: ApiClient) -> None:
    assert (await api.create(PODS, {"kind": "Pod"}, "research"))["kind"] == "Pod"


DENIED = 'admission webhook "budget.example" denied the request: no budget'
NO_WEBHOOK = 'Internal error occurred: failed calling webhook "mesh.example": failed to call webhook: Post: refused'


@pytest.mark.parametrize(
    ("answer", "expected", "message"),
    [
        (refusal(404, "NotFound"), NotFound, "^no$"),
        (refusal(409, "AlreadyExists"), AlreadyExists, "^no$"),
        (refusal(409, "Conflict"), Conflict, "^no$"),
        (refusal(403, "Forbidden"), Forbidden, "^no$"),
        (refusal(403, "Forbidden", causes=("NamespaceTerminating",)), NamespaceTerminating, "^no$"),
        (refusal(422, "Invalid"), Invalid, "^no$"),
        (refusal(400, "BadRequest"), Invalid, "^no$"),
        *[
            (refusal(code, reason, DENIED), Forbidden, "no budget")  # a webhook refuses, whatever the code
            for code, reason in [(400, "BadRequest"), (404, "NotFound"), (409, "AlreadyExists"), (409, "Conflict")]
        ],
        (refusal(429, "TooManyRequests", DENIED), Forbidden, "no budget"),
        (refusal(500, "InternalError", DENIED), Forbidden, "no budget"),
    ],
)
def test_a_refusal_has_the_servers_message_and_is_not_retried(
    answer: Answer, expected: type[ApiError], message: str
) -> None:
    async def refused(api: ApiClient) -> None:
        with pytest.raises(ApiError, match=message) as caught:
            await create(api)
        assert type(caught.value) is expected

    assert len(sent(refused, *[answer] * 9, method="POST")) == 1


@pytest.mark.parametrize(
    ("answer", "expected", "message"),
    [
        (refusal(429, "TooMany"), Unavailable, "no"),
        (refusal(500, "Internal"), Unavailable, "no"),
        (refusal(503, "x"), Unavailable, "no"),
        (refusal(500, "InternalError", NO_WEBHOOK), WebhookFailed, "webhook"),
        (Answer(502, "out of service"), Unavailable, "out of service"),
        (Answer(0), Unavailable, "no answer from the API server"),
    ],
)
def test_overload_failure_and_silence_are_tried_again(answer: Answer, expected: type[ApiError], message: str) -> None:
    assert len(sent(create, answer, answer, method="POST")) == QUICK.attempts

    async def given_up(api: ApiClient) -> None:
        with pytest.raises(ApiError, match=message) as caught:
            await create(api)
        assert type(caught.value) is expected

    assert len(sent(given_up, *[answer] * 9, method="POST")) == QUICK.attempts


def test_the_server_says_how_long_to_wait() -> None:
    began = time.monotonic()
    sent(get, refusal(429, "TooMany", Retry_After="1"))
    assert time.monotonic() - began >= 1.0


def test_a_server_that_does_not_answer_in_time_is_unavailable() -> None:
    async def given_up(api: ApiClient) -> None:
        with pytest.raises(Unavailable, match="no answer from the API server"):
            await get(api)

    sent(given_up, Answer(after_seconds=1.0), timeout_seconds=0.05, retry=RetryPolicy(attempts=1))


def test_writes_say_who_writes_and_how() -> None:
    async def write(api: ApiClient) -> None:
        config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": "research"}}
        await api.apply(config_map, "its-uid")
        await api.patch(RLJOBS, "a", {"status": {}}, "research", "status")
        await api.delete(PODS, "a", "research", uid="u1", grace_seconds=7)

    applied, patched, deleted = sent(write)
    assert (applied.method, applied.path) == ("PATCH", "/api/v1/namespaces/research/configmaps/a")
    assert applied.query == {"fieldManager": "rljob-operator", "force": "true"}
    assert applied.body["metadata"]["uid"] == "its-uid"
    assert applied.content_type == "application/apply-patch+yaml"
    assert applied.authorization == "Bearer secret"
    assert patched.path == "/apis/rljob.dev/v1alpha1/namespaces/research/rljobs/a/status"
    assert patched.content_type == "application/merge-patch+json"
    assert deleted.body == {"preconditions": {"uid": "u1"}, "gracePeriodSeconds": 7}


def page(*sizes: int, more: str = "") -> Answer:
    items = [{"metadata": {"name": f"of-{size}"}, "text": "x" * size} for size in sizes]
    return Answer(body={"items": items, "metadata": {"resourceVersion": "5", "continue": more}})


def test_lists_come_in_pages_and_pages_of_large_objects_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 8 MiB of a page are read; here 2 kB. Pages grow again when the objects are small."""
    monkeypatch.setattr("rljob_operator.kube.client._LARGEST_PAGE_BYTES", 2000)

    async def read(api: ApiClient) -> None:
        pages = [
            ([pod["metadata"]["name"] for pod in pods], at) async for pods, at in api.list_pages(PODS, None, "a=b")
        ]
        assert pages == [(["of-5000"], "5"), (["of-5", "of-6"], "5"), (["of-7", "of-8", "of-9"], "5")]

    too_large = page(*[1500] * PAGE), page(*[1500] * 25), page(*[1500] * 6)
    asked = sent(read, *too_large, page(5000, more="b"), page(5, 6, more="c"), page(7, 8, 9))
    assert [(request.query["limit"], request.query.get("continue")) for request in asked] == [
        ("100", None), ("25", None), ("6", None), ("1", None), ("2", "b"), ("4", "c"),
    ]  # fmt: skip
    assert all(request.query["labelSelector"] == "a=b" for request in asked)


def test_never_more_requests_at_once_than_allowed() -> None:
    async def several(api: ApiClient) -> None:
        await asyncio.gather(*(get(api) for _ in range(6)))

    began = time.monotonic()
    sent(several, *[Answer(body={}, after_seconds=0.05)] * 6, concurrency=2)
    assert time.monotonic() - began >= 3 * 0.05


def test_a_guard_stops_writes_and_lets_reads_pass() -> None:
    def guard() -> None:
        raise PermissionError

    async def guarded(api: ApiClient) -> None:
        await get(api)
        with pytest.raises(PermissionError):
            await create(api)

    assert [request.method for request in sent(guarded, guard=guard)] == ["GET"]


@pytest.mark.parametrize(
    ("answer", "server", "ports"),
    [
        (Answer(body={"ports": [{"name": "https", "port": 16443}]}), "https://10.96.0.1:443", (443, 16443)),
        (Answer(body={"ports": None}), "https://example.org:7443", (443, 7443)),
        (Answer(body={"ports": [{"port": 8443}]}), "https://10.96.0.1", (443, 8443)),
        (refusal(403, "Forbidden"), "https://10.96.0.1:443", (443, 6443)),
        (refusal(404, "NotFound"), "https://[fd00::1]:8443", (443, 6443, 8443)),
    ],
)
def test_ports_of_the_api_server_are_those_of_service_and_endpoints(
    answer: Answer, server: str, ports: tuple[int, ...]
) -> None:
    async def find(api: ApiClient) -> None:
        assert await api_server_ports(api, server) == ports

    [asked] = sent(find, answer)
    assert asked.path == "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes"
