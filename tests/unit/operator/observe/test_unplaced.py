"""Jobs that wait for nodes are woken in portions, if nodes gain room."""

from __future__ import annotations

import asyncio

import pytest

from rljob_operator.kube.watch import Key
from rljob_operator.observe import unplaced
from rljob_operator.observe.unplaced import UnplacedJobs, gains_room
from rljob_operator.reconcile.observed import ObservedNode

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
    ],
)
def test_only_more_room_wakes_jobs(before: ObservedNode | None, after: ObservedNode | None, gained: bool) -> None:
    assert gains_room(before, after) is gained


def waiting(count: int) -> tuple[UnplacedJobs, list[Key]]:
    woken: list[Key] = []
    jobs = UnplacedJobs(woken.append)
    for number in range(count):
        jobs.update(("a", f"job-{number}"), waits=True)
    return jobs, woken


def test_nodes_that_flap_wake_no_job_twice_before_all_others() -> None:
    jobs, _ = waiting(250)
    portions = []
    for _ in range(3):
        jobs.wake_later()
        jobs.wake_later()
        portions.append(jobs.next_portion())
    assert [len(portion) for portion in portions] == [100, 100, 100]
    assert len({key for portion in portions for key in portion}) == 250


def test_a_job_that_has_nodes_by_now_is_not_woken() -> None:
    jobs, _ = waiting(2)
    jobs.wake_later()
    jobs.update(("a", "job-0"), waits=False)
    assert jobs.next_portion() == [("a", "job-1")]
    assert jobs.next_portion() == []


def test_few_jobs_are_all_woken_after_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unplaced, "_PAUSE_SECONDS", 0.0)
    jobs, woken = waiting(3)

    async def story() -> None:
        running = asyncio.create_task(jobs.run())
        jobs.wake_later()
        while len(woken) < 3:
            await asyncio.sleep(0)
        running.cancel()

    asyncio.run(asyncio.wait_for(story(), 240))
    assert sorted(woken) == [("a", f"job-{number}") for number in range(3)]
