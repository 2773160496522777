"""Caches: the newest news counts, in any order; little memory; jobs without nodes are woken if nodes gain room."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from rljob_operator.kube.watch import Key
from rljob_operator.metrics import REGISTRY
from rljob_operator.observe import node_facts
from rljob_operator.observe.cache import Cache
from rljob_operator.observe.node_facts import UnplacedJobs, gains_room
from rljob_operator.observe.observer import Observer
from rljob_operator.reconcile.observed import ObservedNode
from rljob_testing.operator import manifests
from tests.unit.operator.observe.objects import Object, job, node, pod, step_report

A: Key = ("research", "a")


def obj(version: int, value: str = "", name: str = "a", namespace: str = "research") -> Object:
    metadata = {"namespace": namespace, "name": name, "resourceVersion": str(version)}
    return {"metadata": metadata, "value": value or f"v{version}"}


def cache(on_change: Callable[[Key, str | None, str | None], None] = lambda *_: None) -> Cache[str]:
    return Cache(lambda obj: str(obj["value"]), on_change, "things")


@given(history=st.lists(st.booleans(), min_size=1, max_size=8), data=st.data())
def test_any_order_of_delivery_ends_with_the_newest_state(history: list[bool], data: st.DataObject) -> None:
    """`history`: at each revision the object is there (True) or was deleted."""
    deliveries = data.draw(st.permutations(range(1, len(history) + 1)))
    facts = cache()
    for version in deliveries:
        if history[version - 1]:
            facts.put(obj(version))
        else:
            facts.remove(obj(version))
    assert facts.get(A) == (f"v{len(history)}" if history[-1] else None)


def test_a_listing_takes_away_what_it_does_not_hold_in_its_namespace() -> None:
    facts = cache()
    for version, name, namespace in (
        (5, "a", "research"),
        (5, "b", "research"),
        (5, "a", "other"),
        (12, "new", "research"),
    ):
        facts.put(obj(version, name=name, namespace=namespace))
    facts.keep_only({("research", "b")}, "8", "research")
    assert dict(facts.items()).keys() == {("research", "b"), ("other", "a"), ("research", "new")}


def test_only_changed_facts_are_reported() -> None:
    changes = list[tuple[Key, str | None, str | None]]()
    facts = cache(lambda *change: changes.append(change))
    facts.put(obj(1, "same"))
    facts.put(obj(2, "same"))
    facts.put(obj(3, "other"))
    facts.remove(obj(4))
    assert changes == [(A, None, "same"), (A, "same", "other"), (A, "other", None)]


def test_an_object_that_a_write_did_not_find_is_forgotten() -> None:
    facts = cache()
    facts.put(obj(5))
    facts.forget(A)
    facts.forget(A)
    assert facts.get(A) is None


def test_an_object_that_cannot_be_reduced_is_ignored_and_counted() -> None:
    def count() -> float | None:
        return REGISTRY.get_sample_value("rljob_operator_unreadable_objects", {"resource": "things"})

    facts = cache()
    facts.put(obj(5))
    broken = obj(6)
    del broken["value"]
    facts.put(broken)
    assert (facts.get(A), count()) == ("v5", 1.0)
    facts.put(obj(7))
    assert (facts.get(A), count()) == ("v7", 0.0)
    facts.put(broken | {"metadata": broken["metadata"] | {"resourceVersion": "8"}})
    facts.keep_only(set(), "9", None)
    assert (facts.get(A), count()) == (None, 0.0)


# --- memory: the limits are for ten thousand jobs on five thousand nodes ---

COUNT = 300
RANKS = 64
MEMORY = dict.fromkeys(
    ("allocatedBytes", "reservedBytes", "peakAllocatedBytes", "deviceFreeBytes", "deviceTotalBytes", "hostUsedBytes"),
    123_456_789_012,
)


def job_of(number: int) -> Object:
    spec = manifests.job(policy={"replicas": 8, "template": {"spec": {"nodeSelector": {"gpu": "h200"}}}})["spec"]
    conditions = [
        {"type": f"Condition{n}", "status": "False", "reason": "NotYet", "message": f"a message of some length {n}" * 2}
        for n in range(7)
    ]
    return job(f"job-{number}", uid=f"uid-{number}", spec=spec, status={"conditions": conditions})


def report_of(number: int) -> Object:
    memory = [{"role": "policy", "rank": rank, "phase": "update", **MEMORY} for rank in range(RANKS)]
    report = step_report(step=1, memory=memory)
    return report | {"metadata": report["metadata"] | {"name": f"job-{number}"}}


@pytest.mark.parametrize(
    ("cache", "made", "most_bytes"),
    [
        ("jobs", job_of, 1_500),
        ("pods", lambda number: pod(f"job-{number}-controller"), 1_200),
        ("step_reports", report_of, 1_500),
        ("nodes", lambda number: node(f"node-{number}", gpus="8"), 700),
    ],
)
def test_what_stays_of_an_object(cache: str, made: Callable[[int], dict[str, Any]], most_bytes: int) -> None:
    observer = Observer(("nvidia.com/gpu",), lambda _: None)
    texts = [json.dumps(made(number)) for number in range(COUNT)]
    tracemalloc.start()
    try:
        for text in texts:
            getattr(observer, cache).put(from_json(text))
        snapshot = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    # Without what threads of other tests allocate meanwhile.
    here = [tracemalloc.Filter(True, pattern) for pattern in (__file__, "*/rljob_operator/*")]
    by_file = snapshot.filter_traces(here).statistics("filename")
    kept = sum(each.size for each in by_file)
    assert len(getattr(observer, cache)) == COUNT
    assert kept / COUNT < most_bytes, f"{kept / COUNT:.0f} bytes of {len(texts[0])}"


# --- jobs that wait for nodes ---

READY = ObservedNode("n", gpus=4, usable=True)
TAINTED = ObservedNode("n", gpus=4, usable=True, tainted=True)
CORDONED = ObservedNode("n", gpus=4, usable=False)


@pytest.mark.parametrize(
    ("before", "after", "gained"),
    [
        (None, READY, True),
        (None, CORDONED, False),
        (READY, None, False),
        (READY, CORDONED, False),
        (CORDONED, READY, True),
        (READY, ObservedNode("n", gpus=8, usable=True), True),
        (READY, ObservedNode("n", gpus=2, usable=True), False),
        (READY, ObservedNode("n", gpus=0, usable=True), True),
        (TAINTED, READY, True),
        (READY, TAINTED, False),
        (READY, READY, False),
        (READY, replace(READY, labels=("nvidia.com/gpu.product=NVIDIA-H200",)), True),
        (READY, replace(READY, host_memory_bytes=1 << 40), True),
    ],
)
def test_only_more_room_wakes_jobs(before: ObservedNode | None, after: ObservedNode | None, gained: bool) -> None:
    assert gains_room(before, after) is gained


def waiting(count: int, wake: Callable[[Key], None] = lambda _: None) -> UnplacedJobs:
    jobs = UnplacedJobs(wake)
    for number in range(count):
        jobs.update(("a", f"job-{number}"), waits=True)
    return jobs


def test_nodes_that_flap_wake_no_job_twice_before_all_others() -> None:
    jobs = waiting(250)
    portions = []
    for _ in range(3):
        jobs.wake_later()
        jobs.wake_later()
        portions.append(jobs.next_portion())
    assert [len(portion) for portion in portions] == [100, 100, 100]
    assert len({key for portion in portions for key in portion}) == 250


def test_a_job_that_has_nodes_by_now_is_not_woken() -> None:
    jobs = waiting(2)
    jobs.wake_later()
    jobs.update(("a", "job-0"), waits=False)
    assert jobs.next_portion() == [("a", "job-1")]
    assert jobs.next_portion() == []


def test_few_jobs_are_all_woken_after_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_facts, "_PAUSE_SECONDS", 0.0)
    woken: list[Key] = []
    jobs = waiting(3, woken.append)

    async def story() -> None:
        running = asyncio.create_task(jobs.run())
        jobs.wake_later()
        while len(woken) < 3:
            await asyncio.sleep(0)
        running.cancel()

    asyncio.run(asyncio.wait_for(story(), 240))
    assert sorted(woken) == [("a", f"job-{number}") for number in range(3)]
