"""The queue of jobs: each once, one worker a job, running jobs first, namespaces in turn, failures by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_operator.kube.watch import Key
from rljob_operator.metrics import REGISTRY
from rljob_operator.runtime import job_queue
from rljob_operator.runtime.job_queue import FairOrder, JobQueue, Priority

A, B, C = ("research", "a"), ("research", "b"), ("other", "c")
PENDING, RUNNING = Priority.PENDING, Priority.RUNNING


def play(story: Callable[[JobQueue], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        async with asyncio.timeout(60):
            await story(JobQueue(**options))

    asyncio.run(run())


async def nothing_comes(queue: JobQueue, seconds: float = 0.03) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(seconds):
            await queue.get()


def test_a_job_is_in_it_once_and_queued_again_after_its_work() -> None:
    async def story(queue: JobQueue) -> None:
        for key in (A, B, A, A):
            queue.add(key)
        assert [await queue.get(), await queue.get()] == [A, B]
        queue.add(A)
        queue.add(A)
        await nothing_comes(queue)
        queue.done(A)
        assert await queue.get() == A
        queue.done(A)
        await nothing_comes(queue)

    play(story)


def test_only_the_last_time_to_look_again_counts() -> None:
    async def story(queue: JobQueue) -> None:
        queue.requeue(A, 0.01)
        queue.requeue(A, None)
        await nothing_comes(queue)
        queue.requeue(A, 60.0)
        queue.requeue(A, 0.01)
        assert await queue.get() == A
        queue.done(A)
        await nothing_comes(queue)

    play(story)


def test_a_job_that_fails_waits_longer_each_time_and_holds_up_nobody() -> None:
    async def story(queue: JobQueue) -> None:
        waits = [queue.failed(A) for _ in range(12)]
        assert all(0.5 * 0.25 * 2**n <= wait <= 0.25 * 2**n for n, wait in enumerate(waits[:8]))
        assert max(waits) <= job_queue._LONGEST_BACKOFF_SECONDS
        queue.add(B)
        assert await queue.get() == B
        queue.succeeded(A)
        assert queue.failed(A) <= 0.25

    play(story)


def test_a_closed_queue_lets_its_workers_go() -> None:
    async def story(queue: JobQueue) -> None:
        workers = [asyncio.create_task(queue.get()) for _ in range(3)]
        await asyncio.sleep(0)
        queue.requeue(A, 0.0)
        queue.close()
        assert await asyncio.gather(*workers) == [None, None, None]

    play(story)


def test_a_running_job_comes_first_and_alone_to_a_reserved_worker() -> None:
    async def story(queue: JobQueue) -> None:
        reserved = asyncio.create_task(queue.get(running_only=True))
        queue.add(A)
        await asyncio.sleep(0)
        assert not reserved.done()
        queue.add(B)
        assert await reserved == B
        queue.add(C)
        assert [await queue.get(), await queue.get()] == [C, A]

    play(story, is_running=lambda key: key != A)


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"workqueue_{name}", {"name": "rljob", "controller": "rljob"} | labels) or 0.0


def test_the_metrics_of_the_queue() -> None:
    async def story(queue: JobQueue) -> None:
        before = {name: metric(name) for name in ("adds_total", "retries_total", "work_duration_seconds_count")}
        waited = metric("queue_duration_seconds_count", priority="pending")
        for key in (A, A, B):
            queue.add(key)
        assert metric("depth", priority="pending") == 2
        assert await queue.get() == A
        assert metric("depth", priority="pending") == 1
        assert metric("unfinished_work_seconds") > 0
        assert metric("longest_running_processor_seconds") > 0
        queue.failed(A)
        queue.done(A)
        assert metric("unfinished_work_seconds") == 0
        assert {name: metric(name) - value for name, value in before.items()} == {
            "adds_total": 2,
            "retries_total": 1,
            "work_duration_seconds_count": 1,
        }
        assert metric("queue_duration_seconds_count", priority="pending") - waited == 1

    play(story)


# --- the order ---


def order_of(*entries: tuple[str, str, Priority]) -> FairOrder:
    order = FairOrder()
    for namespace, name, priority in entries:
        order.put((namespace, name), priority)
    return order


def taken(order: FairOrder, *, running_only: bool = False) -> list[str]:
    names = []
    while found := order.take(running_only=running_only):
        names.append(found[0][1])
    return names


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (order_of(("a", "p", PENDING), ("a", "r", RUNNING), ("b", "s", RUNNING)), "r s p"),
        (order_of(("b", "x", PENDING), ("b", "x", RUNNING), ("a", "p", PENDING)), "x p"),
        # namespaces in turn, and first come, first served within one
        (order_of(*[("a", f"a{n}", PENDING) for n in range(4)], ("b", "b0", PENDING)), "a0 b0 a1 a2 a3"),
        (
            order_of(("a", "p", PENDING), *[("a", x, p) for x, p in [("x", PENDING), ("x", RUNNING), ("x", PENDING)]]),
            "x p",
        ),
    ],
)
def test_running_jobs_and_namespaces_have_their_turns(order: FairOrder, expected: str) -> None:
    assert taken(order) == expected.split()


def test_pending_jobs_get_one_turn_in_ten_except_from_reserved_workers() -> None:
    running = [("a", f"r{n}", RUNNING) for n in range(12)]
    assert taken(order_of(*running, ("b", "p", PENDING))).index("p") == 9
    order = order_of(("b", "p", PENDING), *running)
    assert taken(order, running_only=True) == [name for _, name, _ in running]
    assert taken(order) == ["p"]


KEYS = st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"))


@given(st.lists(st.one_of(st.tuples(KEYS, st.sampled_from(Priority)), st.booleans())))
def test_each_key_waits_once_and_none_is_lost(steps: list[tuple[Key, Priority] | bool]) -> None:
    order, waiting = FairOrder(), set[Key]()
    for step in steps:
        if isinstance(step, tuple):
            order.put(*step)
            waiting.add(step[0])
        elif found := order.take(running_only=step):
            waiting.remove(found[0])
        assert len(order) == len(waiting) == sum(order.depth(priority) for priority in Priority)
        assert all(key in order for key in waiting)
