"""Leader election: at most one replica leads, by its own clock, and a leader that cannot renew says so in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_operator.kube import lease as lease_module
from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.errors import RetryPolicy
from rljob_operator.kube.lease import ElectionTimes, LeaderElection, LeadershipLost, decide, held_spec
from tests.unit.operator.kube.scripted_api_server import (
    Answer,
    Asked,
    Object,
    ScriptedApiServer,
    Serving,
    play,
    refusal,
)

NOW, LATER = "2026-01-02T03:04:05.000000Z", "2026-01-02T03:04:07.000000Z"
TIMES = ElectionTimes()
PATIENT = ElectionTimes(lease_duration=600.0, renew_deadline=300.0, retry_period=0.05)
"""No request is given up because the machine is busy: the answers of a script are given once."""


@pytest.mark.parametrize(
    ("spec", "unchanged_seconds", "decision"),
    [
        (None, 0.0, "Create"),
        ({"holderIdentity": "me", "leaseDurationSeconds": 15}, 100.0, "Renew"),
        ({"holderIdentity": "other", "leaseDurationSeconds": 15}, 0.0, "Wait"),
        ({"holderIdentity": "other", "leaseDurationSeconds": 15}, 15.0, "Wait"),
        ({"holderIdentity": "other", "leaseDurationSeconds": 15}, 15.1, "Take"),
        ({"holderIdentity": "", "leaseDurationSeconds": 1}, 0.0, "Take"),
        ({}, 0.0, "Take"),
    ],
)
def test_who_may_do_what(spec: Object | None, unchanged_seconds: float, decision: str) -> None:
    assert decide(spec, "me", unchanged_seconds) == decision


def test_taking_over_counts_a_transition_and_renewing_does_not() -> None:
    taken = held_spec({"holderIdentity": "other", "leaseTransitions": 3}, "me", TIMES, NOW)
    assert taken["leaseTransitions"] == 4
    renewed = held_spec(taken, "me", TIMES, LATER)
    assert renewed["leaseTransitions"] == 4
    assert (renewed["acquireTime"], renewed["renewTime"]) == (NOW, LATER)
    assert held_spec(None, "me", TIMES, NOW)["leaseTransitions"] == 0


def lease(holder: str, seconds: int = 15, version: str = "7", **metadata: Any) -> Answer:
    metadata |= {"name": "lock", "namespace": "operators", "resourceVersion": version}
    return Answer(body={"metadata": metadata, "spec": {"holderIdentity": holder, "leaseDurationSeconds": seconds}})


def answers(server: ScriptedApiServer, *given: tuple[str, Answer], times: int = 1) -> None:
    for method, answer in given:
        server.answer(method, "/leases" if method == "POST" else "/leases/lock", answer, times)


FREE = ("GET", refusal(404, "NotFound"))
LOST_RACE = ("PUT", refusal(409, "Conflict"))

Story = Callable[[LeaderElection, ScriptedApiServer], Awaitable[None]]


def elected(
    story: Story, *before: tuple[str, Answer], times: ElectionTimes = PATIENT, client: type[ApiClient] = ApiClient
) -> list[Asked]:
    """Run `story` with a candidate that became the leader, after these answers. Returns all requests."""

    async def run(serving: Serving) -> None:
        answers(serving.server, *before)
        api = client(serving.connection, concurrency=1, retry=RetryPolicy(attempts=1), timeout_seconds=60.0)
        candidate = LeaderElection(api, name="lock", namespace="operators", identity="me", times=times)
        assert not candidate.leading
        async with asyncio.timeout(60):
            await candidate.acquire()
        assert candidate.leading
        candidate.guard()
        await story(candidate, serving.server)

    return play(run).asked


async def nothing(leader: LeaderElection, server: ScriptedApiServer) -> None:
    pass


async def release(leader: LeaderElection, server: ScriptedApiServer) -> None:
    await leader.release()
    with pytest.raises(LeadershipLost):
        leader.guard()


def test_a_free_lease_is_had_at_once_and_given_back_in_the_end() -> None:
    asked = elected(release, FREE)
    assert [request.method for request in asked] == ["GET", "POST", "PUT"]
    assert asked[-1].body["spec"]["holderIdentity"] == ""


def test_a_lease_is_released_after_a_renewal_whose_response_was_lost() -> None:
    async def story(leader: LeaderElection, server: ScriptedApiServer) -> None:
        for version in ("8", "9"):  # the API server may execute the renewal as late as after the first reading
            answers(server, LOST_RACE, ("GET", lease("me", version=version)))
        await leader.release()

    last = elected(story, FREE)[-1]
    assert (last.method, last.body["metadata"]["resourceVersion"]) == ("PUT", "9")
    assert last.body["spec"]["holderIdentity"] == ""


def test_a_write_whose_response_was_lost_is_repeated_at_once() -> None:
    slow = ElectionTimes(lease_duration=600.0, renew_deadline=300.0, retry_period=3600.0)
    lost = ("POST", refusal(409, "AlreadyExists"))
    last = elected(nothing, FREE, lost, ("GET", lease("me", version="8")), times=slow)[-1]
    assert (last.method, last.body["metadata"]["resourceVersion"]) == ("PUT", "8")


@pytest.mark.parametrize("found", [lease("other"), refusal(404, "NotFound")])
def test_a_lease_that_somebody_else_took_is_not_released(found: Answer) -> None:
    async def story(leader: LeaderElection, server: ScriptedApiServer) -> None:
        answers(server, LOST_RACE, ("GET", found))
        await leader.release()

    assert [request.method for request in elected(story, FREE)] == ["GET", "POST", "PUT", "GET"]


def test_another_leader_keeps_the_lease_for_its_duration() -> None:
    began = time.monotonic()
    asked = elected(nothing, *[("GET", lease("other", seconds=1))] * 200)
    assert time.monotonic() - began >= 1.0
    assert [request.method for request in asked if request.method != "GET"] == ["PUT"]
    assert asked[-1].body["metadata"]["resourceVersion"] == "7"


def test_a_leader_that_cannot_renew_gives_up_before_another_may_take_over() -> None:
    async def story(leader: LeaderElection, server: ScriptedApiServer) -> None:
        answers(server, ("PUT", refusal(500, "Internal")), times=200)
        with pytest.raises(LeadershipLost, match=r"not renewed for 0\.3 s"):
            await leader.hold()
        assert leader.leading, "nobody else may lead yet"

    elected(story, FREE, times=ElectionTimes(lease_duration=600.0, renew_deadline=0.3, retry_period=0.05))


def test_a_lease_that_somebody_else_took_is_lost_at_once() -> None:
    async def story(leader: LeaderElection, server: ScriptedApiServer) -> None:
        answers(server, LOST_RACE, ("GET", lease("other")))
        with pytest.raises(LeadershipLost, match="other leads now"):
            await leader.hold()

    elected(story, FREE)


def test_a_lease_counts_from_the_request_for_it_and_not_from_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server may execute the request at once and answer late: others count from what it stores. A process that
    slept for longer than the lease lasts must not write."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(lease_module, "time", clock)

    class LateAnswers(ApiClient):
        async def create(self, *arguments: Any) -> Object:
            created = await super().create(*arguments)
            clock.now += 10.0
            return created

    async def story(leader: LeaderElection, server: ScriptedApiServer) -> None:
        clock.now = TIMES.lease_duration
        assert not leader.leading
        with pytest.raises(LeadershipLost):
            leader.guard()

    elected(story, FREE, times=TIMES, client=LateAnswers)


def test_a_leader_creates_a_deleted_lease_again() -> None:
    async def story(leader: LeaderElection, server: ScriptedApiServer) -> None:
        answers(server, ("PUT", refusal(404, "NotFound")), FREE)
        held = asyncio.create_task(leader.hold())
        async with asyncio.timeout(60):
            while [method for method, _ in server.writes()].count("POST") < 2:
                await asyncio.sleep(0.01)
        assert not held.done()
        assert leader.leading
        held.cancel()

    writes = [request.method for request in elected(story, FREE) if request.method != "GET"]
    assert writes[:3] == ["POST", "PUT", "POST"]


def test_an_annotation_is_written_at_once_and_read_by_the_next_leader() -> None:
    async def story(leader: LeaderElection, server: ScriptedApiServer) -> None:
        assert leader.annotation("record") == "of the last leader"
        assert leader.annotation("unknown") == ""
        await leader.annotate("record", "mine")
        await leader.release()

    before = {"theirs": "kept", "record": "of the last leader"}
    asked = elected(story, ("GET", lease("", annotations=before)))
    taken, annotated, released = [request.body["metadata"]["annotations"] for request in asked[1:]]
    assert taken == before
    assert annotated == released == before | {"record": "mine"}
