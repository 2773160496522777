"""Events: complete, counted where they repeat, never too many, never in the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from rljob_operator.apply.event_recorder import EventRecorder, Tokens
from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.retry import RetryPolicy
from rljob_operator.reconcile.desired import EventNote
from rljob_operator.reconcile.observed import Observed
from tests.unit.operator.kube.scripted_api_server import Asked, ScriptedApiServer, Serving, nothing, play, refusal

EVENTS = "/apis/events.k8s.io/v1/namespaces/research/events"
STARTED = EventNote("Normal", "AttemptStarted", "attempt 1 starts")
FAILED = EventNote("Warning", "JobFailed", "it ended")


def job(uid: str = "u1") -> Observed:
    return Observed(
        job=None,
        namespace="research",
        name="sums",
        uid=uid,
        generation=1,
        created_at=datetime(2026, 1, 2, tzinfo=UTC),
        deleting=False,
        has_finalizer=True,
        pods=(),
        step_report=None,
        nodes=(),
    )


def recorded(
    notes: list[tuple[Observed, EventNote]], script: Callable[[ScriptedApiServer], None] = nothing
) -> list[Asked]:
    async def story(serving: Serving) -> None:
        client = ApiClient(serving.connection, concurrency=1, retry=RetryPolicy(attempts=1))
        recorder = EventRecorder(client, instance="operator-0")
        running = asyncio.create_task(recorder.run())
        for about, note in notes:
            recorder.record(about, note)
        await recorder.flush()
        running.cancel()
        await client.close()

    return play(story, script).asked


def test_an_event_says_what_happened_to_which_job() -> None:
    [asked] = recorded([(job(), STARTED)])
    assert (asked.method, asked.path) == ("POST", EVENTS)
    event = asked.body
    assert (event["type"], event["reason"], event["note"]) == ("Normal", "AttemptStarted", "attempt 1 starts")
    assert event["regarding"] == {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "namespace": "research",
        "name": "sums",
        "uid": "u1",
    }
    assert event["reportingInstance"] == "operator-0"
    assert event["metadata"]["name"].startswith("sums.")


def test_equal_notes_are_counted_in_one_event() -> None:
    created, *repeated = recorded([(job(), STARTED)] * 3)
    assert [asked.method for asked in repeated] == ["PATCH", "PATCH"]
    assert {asked.path for asked in repeated} == {f"{EVENTS}/{created.body['metadata']['name']}"}
    assert [asked.body["series"]["count"] for asked in repeated] == [2, 3]


def test_notes_of_two_jobs_are_two_events() -> None:
    assert [asked.method for asked in recorded([(job("u1"), STARTED), (job("u2"), STARTED)])] == ["POST", "POST"]


def test_a_counted_event_that_has_expired_is_made_anew() -> None:
    asked = recorded([(job(), STARTED)] * 2, lambda server: server.answer("PATCH", "", refusal(404, "NotFound")))
    assert [request.method for request in asked] == ["POST", "PATCH", "POST"]


@pytest.mark.parametrize("text", ["x" * 2000, "→" * 500, "x" + "→" * 500, "16384 → 8192, " * 70])
def test_a_long_note_is_cut_to_the_bytes_that_the_api_server_takes(text: str) -> None:
    [asked] = recorded([(job(), replace(FAILED, message=text))])
    note = asked.body["note"]
    assert 1024 - 3 <= len(note.encode()) <= 1024
    assert note.endswith("…")
    assert text.startswith(note.removesuffix("…"))


def test_a_refused_event_is_dropped_and_the_next_one_written() -> None:
    asked = recorded(
        [(job(), STARTED), (job(), FAILED)],
        lambda server: server.answer("POST", "/events", refusal(403, "Forbidden")),
    )
    assert [request.body["reason"] for request in asked] == ["AttemptStarted", "JobFailed"]


def test_a_job_that_talks_too_much_is_cut_short() -> None:
    notes = [(job(), EventNote("Normal", "Chatter", f"{number}")) for number in range(60)]
    assert len(recorded(notes)) == 25


def test_tokens_come_back_with_time() -> None:
    tokens = Tokens(burst=2, seconds_per_token=10.0)
    assert [tokens.take(now) for now in (0.0, 1.0, 2.0)] == [True, True, False]
    assert [tokens.take(now) for now in (11.0, 12.0)] == [True, False]
