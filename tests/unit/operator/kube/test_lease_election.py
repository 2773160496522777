"""Leader election: at most one replica leads, by its own clock, and a leader that cannot renew says so in time."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_operator.kube import lease as lease_module
from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.lease import ElectionTimes, LeaderElection, LeadershipLost, decide, held_spec
from rljob_operator.kube.retry import RetryPolicy
from tests.unit.operator.kube.scripted_api_server import Answer, Object, Serving, play, refusal

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
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
    renewed = held_spec(taken, "me", TIMES, datetime(2026, 1, 2, 3, 4, 7, tzinfo=UTC))
    assert renewed["leaseTransitions"] == 4
    assert renewed["acquireTime"] == "2026-01-02T03:04:05.000000Z"
    assert renewed["renewTime"] == "2026-01-02T03:04:07.000000Z"
    assert held_spec(None, "me", TIMES, NOW)["leaseTransitions"] == 0


def election(serving: Serving, times: ElectionTimes = PATIENT) -> LeaderElection:
    client = ApiClient(serving.connection, concurrency=1, retry=RetryPolicy(attempts=1), timeout_seconds=60.0)
    return LeaderElection(client, name="lock", namespace="operators", identity="me", times=times)


def lease(holder: str, seconds: int = 15, version: str = "7") -> Answer:
    metadata = {"name": "lock", "namespace": "operators", "resourceVersion": version}
    return Answer(body={"metadata": metadata, "spec": {"holderIdentity": holder, "leaseDurationSeconds": seconds}})


def test_a_free_lease_is_had_at_once_and_given_back_in_the_end() -> None:
    async def story(serving: Serving) -> None:
        serving.server.answer("GET", "/leases/lock", refusal(404, "NotFound"))
        candidate = election(serving)
        assert not candidate.leading
        await candidate.acquire()
        assert candidate.leading
        candidate.guard()
        await candidate.release()
        with pytest.raises(LeadershipLost):
            candidate.guard()

    server = play(story)
    assert [method for method, _ in server.writes()] == ["POST", "PUT"]
    assert server.asked[-1].body["spec"]["holderIdentity"] == ""


def test_a_lease_is_released_after_a_renewal_whose_response_was_lost() -> None:
    async def story(serving: Serving) -> None:
        serving.server.answer("GET", "/leases/lock", refusal(404, "NotFound"))
        leader = election(serving)
        await leader.acquire()
        for version in ("8", "9"):  # the API server may execute the renewal as late as after the first reading
            serving.server.answer("PUT", "/leases/lock", refusal(409, "Conflict"))
            serving.server.answer("GET", "/leases/lock", lease("me", version=version))
        await leader.release()

    last = play(story).asked[-1]
    assert last.method == "PUT"
    assert last.body["metadata"]["resourceVersion"] == "9"
    assert last.body["spec"]["holderIdentity"] == ""


def test_a_write_whose_response_was_lost_is_repeated_at_once() -> None:
    async def story(serving: Serving) -> None:
        serving.server.answer("GET", "/leases/lock", refusal(404, "NotFound"))
        serving.server.answer("POST", "/leases", refusal(409, "AlreadyExists"))
        serving.server.answer("GET", "/leases/lock", lease("me", version="8"))
        candidate = election(serving, ElectionTimes(lease_duration=600.0, renew_deadline=300.0, retry_period=3600.0))
        async with asyncio.timeout(60):
            await candidate.acquire()

    last = play(story).asked[-1]
    assert (last.method, last.body["metadata"]["resourceVersion"]) == ("PUT", "8")


@pytest.mark.parametrize("found", [lease("other"), refusal(404, "NotFound")])
def test_a_lease_that_somebody_else_took_is_not_released(found: Answer) -> None:
    async def story(serving: Serving) -> None:
        serving.server.answer("GET", "/leases/lock", refusal(404, "NotFound"))
        leader = election(serving)
        await leader.acquire()
        serving.server.answer("PUT", "/leases/lock", refusal(409, "Conflict"))
        serving.server.answer("GET", "/leases/lock", found)
        await leader.release()

    assert [asked.method for asked in play(story).asked] == ["GET", "POST", "PUT", "GET"]


def test_another_leader_keeps_the_lease_for_its_duration() -> None:
    async def story(serving: Serving) -> None:
        serving.server.answer("GET", "/leases/lock", lease("other", seconds=1), times=200)
        began = time.monotonic()
        await election(serving).acquire()
        assert time.monotonic() - began >= 1.0

    server = play(story)
    assert server.writes() == [("PUT", "/apis/coordination.k8s.io/v1/namespaces/operators/leases/lock")]
    assert server.asked[-1].body["metadata"]["resourceVersion"] == "7"


def test_a_leader_that_cannot_renew_gives_up_before_another_may_take_over() -> None:
    async def story(serving: Serving) -> None:
        serving.server.answer("GET", "/leases/lock", refusal(404, "NotFound"), times=50)
        leader = election(serving, ElectionTimes(lease_duration=600.0, renew_deadline=0.3, retry_period=0.05))
        await leader.acquire()
        serving.server.answer("PUT", "/leases/lock", refusal(500, "Internal"), times=200)
        with pytest.raises(LeadershipLost, match=r"not renewed for 0\.3 s"):
            await leader.hold()
        assert leader.leading, "nobody else may lead yet"

    play(story)


def test_a_lease_that_somebody_else_took_is_lost_at_once() -> None:
    async def story(serving: Serving) -> None:
        serving.server.answer("GET", "/leases/lock", refusal(404, "NotFound"))
        leader = election(serving)
        await leader.acquire()
        serving.server.answer("PUT", "/leases/lock", refusal(409, "Conflict"))
        serving.server.answer("GET", "/leases/lock", lease("other"))
        with pytest.raises(LeadershipLost, match="other leads now"):
            await leader.hold()

    play(story)


def test_a_leader_whose_process_slept_must_not_write() -> None:
    async def story(serving: Serving) -> None:
        serving.server.answer("GET", "/leases/lock", refusal(404, "NotFound"))
        leader = election(serving, ElectionTimes(lease_duration=0.1, renew_deadline=300.0, retry_period=0.02))
        await leader.acquire()
        await asyncio.sleep(0.15)
        with pytest.raises(LeadershipLost):
            leader.guard()

    play(story)


def test_a_lease_counts_from_the_request_for_it_and_not_from_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server may execute the request at once and answer late: others count from what it stores."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(lease_module, "time", clock)

    class LateAnswers(ApiClient):
        async def create(self, *arguments: Any) -> Object:
            created = await super().create(*arguments)
            clock.now += 10.0
            return created

    async def story(serving: Serving) -> None:
        serving.server.answer("GET", "/leases/lock", refusal(404, "NotFound"))
        client = LateAnswers(serving.connection, concurrency=1)
        leader = LeaderElection(client, name="lock", namespace="operators", identity="me", times=TIMES)
        await leader.acquire()
        assert leader.leading
        clock.now = TIMES.lease_duration
        assert not leader.leading

    play(story)


def test_a_leader_creates_a_deleted_lease_again() -> None:
    async def story(serving: Serving) -> None:
        serving.server.answer("GET", "/leases/lock", refusal(404, "NotFound"))
        candidate = election(serving)
        await candidate.acquire()
        serving.server.answer("PUT", "/leases/lock", refusal(404, "NotFound"))
        serving.server.answer("GET", "/leases/lock", refusal(404, "NotFound"))
        held = asyncio.create_task(candidate.hold())
        async with asyncio.timeout(60):
            while [method for method, _ in serving.server.writes()].count("POST") < 2:
                await asyncio.sleep(0.01)
        assert not held.done()
        assert candidate.leading
        held.cancel()

    server = play(story)
    assert [method for method, _ in server.writes()][:3] == ["POST", "PUT", "POST"]


def test_an_annotation_is_written_at_once_and_read_by_the_next_leader() -> None:
    async def story(serving: Serving) -> None:
        before = lease("")
        before.body["metadata"]["annotations"] = {"theirs": "kept", "record": "of the last leader"}
        serving.server.answer("GET", "/leases/lock", before)
        leader = election(serving)
        await leader.acquire()
        assert leader.annotation("record") == "of the last leader"
        assert leader.annotation("unknown") == ""
        await leader.annotate("record", "mine")
        await leader.release()

    taken, annotated, released = [asked.body["metadata"]["annotations"] for asked in play(story).asked[1:]]
    assert taken == {"theirs": "kept", "record": "of the last leader"}
    assert annotated == released == {"theirs": "kept", "record": "mine"}
