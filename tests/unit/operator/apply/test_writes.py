"""Patches of a status, waves of writes, and the writes in the background: Events and labels of nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.status import RLJobStatus, StatusDisplay
from rljob_operator.apply import node_labels
from rljob_operator.apply.event_recorder import EventRecorder
from rljob_operator.apply.executor import merge_patch, status_object
from rljob_operator.apply.node_labels import NodeLabels
from rljob_operator.apply.object_writer import LARGEST_WAVE, in_waves
from rljob_operator.events import EventNote
from rljob_operator.kube.errors import Forbidden
from rljob_operator.kube.lease import LeadershipLost
from rljob_operator.reconcile.observed import ObservedJob, ObservedNode
from rljob_operator.token_bucket import TokenBucket
from tests.unit.operator.apply.execution import Script, observed, scripted
from tests.unit.operator.kube.scripted_api_server import Asked, Serving, play, refusal

# --- patches ---

VALUES = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3)


def patched(target: Any, patch: Any) -> Any:
    """MergePatch of RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = patched(result.get(name), value)
    return result


@given(before=OBJECTS, after=OBJECTS)
def test_a_patch_turns_one_status_into_the_other(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert patched(before, merge_patch(before, after)) == after
    assert merge_patch(before, before) == {}


def test_a_status_is_written_in_the_spelling_of_the_api() -> None:
    status = RLJobStatus(observed_generation=2, step=3, display=StatusDisplay(phase="Running"))
    written = status_object(status)
    assert written["observedGeneration"] == 2
    assert "reward" not in written
    assert merge_patch({"reward": 0.5, "step": 2, "observedGeneration": 2}, written)["reward"] is None


# --- waves ---


class Writes:
    """Counts writes, and how many run at once. `errors`: by the number of the write."""

    def __init__(self, errors: dict[int, Exception] | None = None) -> None:
        self.errors = errors or {}
        self.begun = 0
        self.finished: list[int] = []
        self.widest = 0

    async def write(self, number: int) -> None:
        self.begun += 1
        self.widest = max(self.widest, self.begun - len(self.finished))
        await asyncio.sleep(0)
        self.finished.append(number)
        if number in self.errors:
            raise self.errors[number]

    def run(self, count: int, first: int) -> None:
        asyncio.run(in_waves([lambda n=n: self.write(n) for n in range(count)], first))  # type: ignore[misc]


@pytest.mark.parametrize(("count", "first", "widest"), [(0, 4, 0), (3, 4, 3), (100, 4, 16), (1024, 16, LARGEST_WAVE)])
def test_every_write_runs_once_and_few_at_a_time(count: int, first: int, widest: int) -> None:
    writes = Writes()
    writes.run(count, first)
    assert sorted(writes.finished) == list(range(count))
    assert writes.widest == widest


@pytest.mark.parametrize(
    ("errors", "counts"),
    [
        ({1: Forbidden("exceeded quota"), 3: Forbidden("exceeded quota, too")}, 1),
        ({0: Forbidden("exceeded quota"), 2: LeadershipLost("late")}, 2),
    ],
)
def test_a_refusal_costs_one_wave_and_lost_leadership_counts_most(errors: dict[int, Exception], counts: int) -> None:
    writes = Writes(errors)
    with pytest.raises(type(errors[counts])) as raised:
        writes.run(1000, 4)
    assert raised.value is errors[counts]
    assert writes.finished == [0, 1, 2, 3]


# --- Events ---

EVENTS = "/apis/events.k8s.io/v1/namespaces/research/events"
STARTED = EventNote("Normal", "AttemptStarted", "attempt 1 starts")
FAILED = EventNote("Warning", "JobFailed", "it ended")
JOB = observed()


def recorded(notes: Sequence[tuple[ObservedJob, EventNote]], script: Script = ()) -> list[Asked]:
    async def story(serving: Serving) -> None:
        recorder = EventRecorder(serving.client(), instance="operator-0")
        serving.run(recorder.run())
        for about, note in notes:
            recorder.record(about, note)
        await recorder.flush()

    return play(story, scripted(script)).asked


def test_an_event_names_what_happened_to_which_job() -> None:
    [asked] = recorded([(JOB, STARTED)])
    assert (asked.method, asked.path) == ("POST", EVENTS)
    event = asked.body
    assert (event["type"], event["reason"], event["note"]) == ("Normal", "AttemptStarted", "attempt 1 starts")
    regarding = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "namespace": "research", "name": "sums"}
    assert event["regarding"] == regarding | {"uid": JOB.uid}
    assert event["reportingInstance"] == "operator-0"
    assert event["metadata"]["name"].startswith("sums.")


def test_equal_notes_are_counted_in_one_event() -> None:
    created, *repeated = recorded([(JOB, STARTED)] * 3)
    assert {(asked.method, asked.path) for asked in repeated} == {
        ("PATCH", f"{EVENTS}/{created.body['metadata']['name']}")
    }
    assert [asked.body["series"]["count"] for asked in repeated] == [2, 3]


@pytest.mark.parametrize(
    ("notes", "script", "methods"),
    [
        ([(JOB, STARTED), (observed(uid="another"), STARTED)], [], ["POST", "POST"]),
        # One that has expired is created again.
        ([(JOB, STARTED)] * 2, [("PATCH", "", refusal(404, "NotFound"))], ["POST", "PATCH", "POST"]),
        # A refused one is dropped.
        ([(JOB, STARTED), (JOB, FAILED)], [("POST", "/events", refusal(403, "Forbidden"))], ["POST", "POST"]),
        # A job that emits too many gets only the burst.
        ([(JOB, EventNote("Normal", "Chatter", f"{number}")) for number in range(60)], [], ["POST"] * 25),
    ],
)
def test_writes_of_events(notes: list[tuple[ObservedJob, EventNote]], script: Script, methods: list[str]) -> None:
    requests = recorded(notes, script)
    assert [asked.method for asked in requests] == methods
    posted = {asked.body["reason"] for asked in requests if asked.method == "POST"}
    assert posted == {note.reason for _, note in notes}


@pytest.mark.parametrize("text", ["x" * 2000, "→" * 500, "x" + "→" * 500])
def test_a_long_note_is_cut_to_the_bytes_that_the_api_server_takes(text: str) -> None:
    [asked] = recorded([(JOB, replace(FAILED, message=text))])
    note = asked.body["note"]
    assert 1024 - 3 <= len(note.encode()) <= 1024
    assert note.endswith("…")
    assert text.startswith(note.removesuffix("…"))


def test_tokens_come_back_with_time() -> None:
    tokens = TokenBucket(burst=2, seconds_per_token=10.0)
    for now in (100.0, 101.0):
        assert tokens.seconds_left(now) == 0
        tokens.take(now)
    assert [tokens.seconds_left(now) for now in (101.0, 105.0, 110.0, 200.0)] == pytest.approx([9.0, 5.0, 0.0, 0.0])


# --- labels of nodes with GPUs ---


def labelled(nodes: Sequence[tuple[str, bool, bool]], script: Script = (), writes: int = 1) -> list[tuple[str, Any]]:
    """The writes after these nodes were seen, each with whether it has GPUs and whether it is labelled."""

    async def story(serving: Serving) -> None:
        labels = NodeLabels(serving.client())
        serving.run(labels.run())
        for name, has_gpus, is_labelled in nodes:
            marks = ("rljob.dev/has-gpus=true",) if is_labelled else ("rljob.dev/has-gpus=false",)
            labels.check(ObservedNode(name, gpus=int(has_gpus), usable=True, labels=marks))
        while len(serving.server.asked) < writes:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.02)

    asked = play(story, scripted(script)).asked
    return [
        (it.path.removeprefix("/api/v1/nodes/"), it.body["metadata"]["labels"]["rljob.dev/has-gpus"]) for it in asked
    ]


def test_a_node_is_labelled_if_its_label_is_wrong() -> None:
    nodes = [("gained", True, False), ("lost", False, True), ("has", True, True), ("never", False, False)]
    assert sorted(labelled(nodes, writes=2)) == [("gained", "true"), ("lost", None)]
    assert labelled([("set right meanwhile", True, False), ("set right meanwhile", True, True)], writes=0) == []
    gone = refusal(404, "NotFound")
    assert len(labelled([("gone", True, False)], [("PATCH", "/gone", gone)])) == 1


def test_a_refused_label_is_tried_again_and_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_labels, "_FIRST_RETRY_SECONDS", 0.01)
    refused = [("PATCH", "/refused", refusal(code, "Refused")) for code in [500] + [403] * 99]
    nodes = [("first", True, False), ("refused", True, False), ("last", True, False)]
    names = [name for name, _ in labelled(nodes, refused, writes=5)]
    assert names[:3] == ["first", "refused", "last"]
    assert set(names[3:]) == {"refused"}
    assert len(names) < 10, "the retries of a refused node become rare"
