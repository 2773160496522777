"""The probes and the metrics: what they say, and to whom."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.resources import PODS
from rljob_operator.kube.watch import Reflector, Sink
from rljob_operator.metrics import WATCH_AGE_SECONDS
from rljob_operator.runtime.endpoints import Health, TokenCheck, metrics_app, probes_app
from tests.unit.operator.kube.scripted_api_server import Answer, ScriptedApiServer, Serving, play, refusal


def visit(app: web.Application, story: Callable[[TestClient[web.Request, web.Application]], Awaitable[None]]) -> None:
    async def run() -> None:
        async with TestClient(TestServer(app)) as client:
            await story(client)

    asyncio.run(run())


def silent_for(seconds: float) -> Reflector:
    watch = Reflector(cast(ApiClient, None), PODS, cast(Sink, None))
    watch._heard_at -= seconds
    return watch


@pytest.mark.parametrize(
    ("ages_seconds", "unhealthy", "unready"),
    [
        ([], None, None),
        ([3.0, 149.0], None, None),
        ([3.0, 151.0], "silent for 151 s", "silent for 151 s"),
        ([180.0, 190.0], None, "silent for 180 s"),  # of all watches: the API server is away
        ([1600.0, 1600.0], "silent for 1600 s", "silent for 1600 s"),  # a restart may help
    ],
)
def test_silent_watches_make_it_unready_and_one_alone_unhealthy(
    ages_seconds: list[float], unhealthy: str | None, unready: str | None
) -> None:
    health = Health(stale_watch_seconds=150)

    async def story(client: TestClient[web.Request, web.Application]) -> None:
        assert (await client.get("/healthz")).status == 200
        assert (await client.get("/readyz")).status == 503
        health.standing_by()
        assert (await client.get("/readyz")).status == 200, "a standby knows the leader"
        health.watching([silent_for(seconds) for seconds in ages_seconds])
        for path, problem in (("/healthz", unhealthy), ("/readyz", unready)):
            answer = await client.get(path)
            assert answer.status == (503 if problem else 200)
            assert f"the watch of pods has been {problem}" in await answer.text() or not problem

    visit(probes_app(health), story)
    WATCH_AGE_SECONDS.clear()  # its functions would outlive the test


async def earning(code: int, token: str) -> int:
    return code if token == "good" else 401


@pytest.mark.parametrize(
    ("authorization", "may", "status"),
    [
        ("", 200, 401),
        ("Basic good", 200, 401),
        ("Bearer bad", 200, 401),
        ("Bearer good", 403, 403),
        ("Bearer good", 503, 503),
        ("Bearer good", 200, 200),
        ("", None, 200),  # nobody checks
    ],
)
def test_metrics_are_for_those_who_may_read_them(authorization: str, may: int | None, status: int) -> None:
    async def story(client: TestClient[web.Request, web.Application]) -> None:
        answer = await client.get("/metrics", headers={"Authorization": authorization} if authorization else {})
        assert answer.status == status
        assert ("rljob_operator_leader" in await answer.text()) == (status == 200)

    visit(metrics_app(None if may is None else lambda token: earning(may, token)), story)


REVIEWED = Answer(body={"status": {"authenticated": True, "user": {"username": "prometheus", "groups": ["g"]}}})


@pytest.mark.parametrize(
    ("review", "access", "code"),
    [
        (REVIEWED, Answer(body={"status": {"allowed": True}}), 200),
        (REVIEWED, Answer(body={"status": {"allowed": False}}), 403),
        (Answer(body={"status": {"authenticated": False}}), None, 401),
        (refusal(403, "Forbidden"), None, 503),
    ],
)
def test_the_api_server_says_who_may(review: Answer, access: Answer | None, code: int) -> None:
    def script(server: ScriptedApiServer) -> None:
        server.answer("POST", "/tokenreviews", review)
        if access:
            server.answer("POST", "/subjectaccessreviews", access)

    async def story(serving: Serving) -> None:
        assert await TokenCheck(serving.client())("token") == code

    asked = play(story, script).asked
    assert asked[0].body["spec"] == {"token": "token"}
    if access:
        assert asked[1].body["spec"]["user"] == "prometheus"
        assert asked[1].body["spec"]["groups"] == ["g"]
        assert asked[1].body["spec"]["nonResourceAttributes"] == {"path": "/metrics", "verb": "get"}


def test_an_answer_is_remembered_and_no_token_is_asked_about_for_nothing() -> None:
    def script(server: ScriptedApiServer) -> None:
        server.answer("POST", "/tokenreviews", Answer(body={"status": {"authenticated": False}}))

    async def story(serving: Serving) -> None:
        check = TokenCheck(serving.client())
        assert [await check("token"), await check("token"), await check("")] == [401, 401, 401]

    assert len(play(story, script).asked) == 1


def test_a_flood_of_unknown_tokens_is_refused_and_starves_no_known_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def story(serving: Serving) -> None:
        released = asyncio.Event()

        async def ask(self: TokenCheck, token: str) -> int:
            asked.append(token)
            if token != "prometheus":
                await released.wait()
            return 200 if token == "prometheus" else 401

        monkeypatch.setattr(TokenCheck, "_ask", ask)
        check = TokenCheck(serving.client())
        assert await check("prometheus") == 200
        check._accepted.update(dict.fromkeys(check._accepted, 0.0))
        flood = [asyncio.create_task(check(f"token {number}")) for number in range(600)]
        await asyncio.sleep(0)
        assert await check("prometheus") == 200
        released.set()
        answers = await asyncio.gather(*flood)
        assert (answers.count(401), answers.count(503)) == (4, 596)
        for number in range(3000):
            check._remember(f"token {number}".encode(), 401)
        assert await check("prometheus") == 200, "known callers are not forgotten for unknown ones"

    play(story)
    assert len(asked) == 6
