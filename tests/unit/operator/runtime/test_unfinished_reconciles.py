"""A reconcile that takes long delays nothing else, and one that ended its process comes last in the next one."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from datetime import datetime

import pytest

from rljob_operator.kube.watch import Key
from rljob_operator.observe.observer import Observer
from rljob_operator.reconcile.desired import Desired
from rljob_operator.reconcile.observed import Observed
from rljob_operator.runtime import reconcile_loop, unfinished_reconciles
from rljob_operator.runtime.reconcile_loop import ReconcileLoop
from rljob_operator.runtime.unfinished_reconciles import UnfinishedReconciles, wait_seconds
from rljob_operator.runtime.work_queue import WorkQueue
from rljob_operator.settings import OperatorSettings
from rljob_testing.patience import PATIENCE_SECONDS
from tests.unit.operator.observe.objects import Object, job
from tests.unit.operator.runtime.test_reconcile_loop import SETTINGS, SUMS, Answers

NONE: dict[str, int] = {}


class Loop:
    """A reconcile loop with these jobs, and the records that it wrote."""

    def __init__(self, decide: Callable[[Observed], None], *jobs: Object, recorded: str = "") -> None:
        self.records: list[dict[str, int]] = []
        self.executor = Answers()
        self.queue = WorkQueue()
        self.unfinished = UnfinishedReconciles(recorded, self._record)
        self.observer = Observer((), self.queue.add)
        self._decide = decide
        for stored in jobs or (job(),):
            self.observer.jobs.put(stored)

    async def _record(self, text: str) -> None:
        self.records.append(json.loads(text))

    def _reconcile(self, observed: Observed, settings: OperatorSettings, now: datetime) -> Desired:
        self._decide(observed)
        return Desired()

    def run(self, until: Callable[[], Awaitable[object]]) -> None:
        async def run() -> None:
            loop = ReconcileLoop(SETTINGS, self.queue, self.observer, self.executor, self._reconcile, self.unfinished)
            working = asyncio.create_task(loop.run())
            async with asyncio.timeout(PATIENCE_SECONDS):
                await until()
                self.queue.close()
                await working

        asyncio.run(run())


async def holds(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_the_event_loop_runs_while_a_job_is_reconciled() -> None:
    released = threading.Event()

    async def release() -> None:
        released.set()  # on the event loop: a reconcile that ran there would wait for itself
        await holds(lambda: loop.executor.carried_out)

    loop = Loop(lambda _: require(released.wait(PATIENCE_SECONDS)))
    loop.run(release)
    assert loop.executor.bugs == []


def require(held: bool) -> None:
    assert held


def test_a_slow_reconcile_is_recorded_until_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile_loop, "SLOW_SECONDS", 0.0)
    released = threading.Event()

    async def release() -> None:
        await holds(lambda: loop.records == [{"research/sums": 1}])
        released.set()
        await holds(lambda: loop.executor.carried_out)

    loop = Loop(lambda _: require(released.wait(PATIENCE_SECONDS)))
    loop.run(release)
    assert loop.records == [{"research/sums": 1}, NONE]


def test_a_fast_reconcile_writes_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile_loop, "SLOW_SECONDS", PATIENCE_SECONDS)
    loop = Loop(lambda _: None)
    loop.run(lambda: holds(lambda: loop.executor.carried_out))
    assert loop.records == []


def test_a_job_over_which_a_process_ended_waits_and_says_so() -> None:
    reconciled: list[str] = []
    recorded = '{"research/sums": 2}'
    loop = Loop(lambda seen: reconciled.append(seen.name), job(), job("honest", uid="h"), recorded=recorded)
    loop.run(lambda: holds(lambda: reconciled and loop.executor.bugs))
    assert reconciled == ["honest"]
    assert "the operator's process ended 2 times while it reconciled this job" in loop.executor.bugs[0]
    assert loop.records == [], "the record stays for the next process"


def test_a_job_whose_wait_is_over_is_recorded_before_it_is_reconciled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unfinished_reconciles, "_FIRST_WAIT_SECONDS", 0.0)
    before: list[list[dict[str, int]]] = []
    loop = Loop(lambda _: before.append(list(loop.records)), recorded='{"research/sums": 2}')
    loop.run(lambda: holds(lambda: loop.executor.carried_out))
    assert before == [[{"research/sums": 3}]]
    assert loop.records[-1] == NONE


def test_a_deleted_job_does_not_wait() -> None:
    reconciled: list[str] = []
    deleted = job()
    deleted["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    loop = Loop(lambda seen: reconciled.append(seen.name), deleted, recorded='{"research/sums": 9}')
    loop.run(lambda: holds(lambda: reconciled))


@pytest.mark.parametrize("text", ["", "{}", "[]", "nonsense", '{"a/b/c": 1}', '{"a/b": "x"}', '{"a/b": null}', "5"])
def test_a_record_of_another_form_counts_as_empty(text: str) -> None:
    assert UnfinishedReconciles(text).deaths(("a", "b")) == 0


def test_jobs_that_are_gone_leave_the_record() -> None:
    async def record(text: str) -> None:
        records.append(json.loads(text))

    records: list[dict[str, int]] = []
    unfinished = UnfinishedReconciles('{"research/sums": 1, "research/gone": 4}', record)
    asyncio.run(unfinished.keep_only({SUMS}))
    gone: Key = ("research", "gone")
    assert (records, unfinished.deaths(gone), unfinished.deaths(SUMS)) == ([{"research/sums": 1}], 0, 1)


def test_the_wait_doubles_with_each_process_up_to_ten_minutes() -> None:
    assert [wait_seconds(deaths) for deaths in (1, 2, 3, 50)] == [30.0, 60.0, 120.0, 600.0]
