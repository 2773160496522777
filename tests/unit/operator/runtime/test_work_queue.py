"""The queue of jobs: each once, one worker a job, looked at again when it is time, failures by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rljob_operator.metrics import REGISTRY
from rljob_operator.runtime import work_queue
from rljob_operator.runtime.fair_order import Priority
from rljob_operator.runtime.work_queue import WorkQueue

A, B = ("research", "a"), ("research", "b")


def play(story: Callable[[WorkQueue], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(60):
            await story(WorkQueue())

    asyncio.run(run())


async def nothing_comes(queue: WorkQueue, seconds: float = 0.03) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(seconds):
            await queue.get()


def test_a_job_is_in_it_once_and_first_come_is_first_served() -> None:
    async def story(queue: WorkQueue) -> None:
        for key in (A, B, A, A):
            queue.add(key)
        assert [await queue.get(), await queue.get()] == [A, B]
        await nothing_comes(queue)

    play(story)


def test_a_key_that_changes_during_its_work_is_queued_again_after_it() -> None:
    async def story(queue: WorkQueue) -> None:
        queue.add(A)
        assert await queue.get() == A
        queue.add(A)
        queue.add(A)
        await nothing_comes(queue)
        queue.done(A)
        assert await queue.get() == A
        queue.done(A)
        await nothing_comes(queue)

    play(story)


def test_only_the_last_time_to_look_again_counts() -> None:
    async def story(queue: WorkQueue) -> None:
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
    async def story(queue: WorkQueue) -> None:
        waits = [queue.failed(A) for _ in range(12)]
        assert all(0.5 * 0.25 * 2**n <= wait <= 0.25 * 2**n for n, wait in enumerate(waits[:8]))
        assert max(waits) <= work_queue._LONGEST_BACKOFF_SECONDS
        queue.add(B)
        assert await queue.get() == B
        queue.succeeded(A)
        assert queue.failed(A) <= 0.25

    play(story)


def test_a_closed_queue_lets_its_workers_go() -> None:
    async def story(queue: WorkQueue) -> None:
        workers = [asyncio.create_task(queue.get()) for _ in range(3)]
        await asyncio.sleep(0)
        queue.requeue(A, 0.0)
        queue.close()
        assert await asyncio.gather(*workers) == [None, None, None]

    play(story)


def test_a_running_job_waits_behind_no_pending_one() -> None:
    async def story() -> None:
        queue = WorkQueue(lambda key: Priority.RUNNING if key == B else Priority.PENDING)
        queue.add(A)
        queue.add(B)
        assert await queue.get() == B

    asyncio.run(story())


def test_a_reserved_worker_waits_for_a_running_job() -> None:
    async def story() -> None:
        queue = WorkQueue(lambda key: Priority.RUNNING if key == B else Priority.PENDING)
        reserved = asyncio.create_task(queue.get(running_only=True))
        queue.add(A)
        await asyncio.sleep(0)
        assert not reserved.done()
        queue.add(B)
        assert await reserved == B

    asyncio.run(story())


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"workqueue_{name}", {"name": "rljob", "controller": "rljob"} | labels) or 0.0


def test_the_metrics_of_the_queue() -> None:
    async def story(queue: WorkQueue) -> None:
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
