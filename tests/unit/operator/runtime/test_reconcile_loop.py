"""Rounds of the reconcile loop: what comes of decisions, refusals, mistakes, slow reconciles and lost processes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from datetime import datetime

import pytest

from rljob_operator.apply.executor import Executor, JobGone
from rljob_operator.apply.object_writer import ForeignObject, LeftBehind, MissingObject, NameTaken
from rljob_operator.events import EventNote
from rljob_operator.kube.errors import (
    Conflict,
    Forbidden,
    Invalid,
    NamespaceTerminating,
    Unavailable,
    WebhookFailed,
    error_of,
)
from rljob_operator.kube.lease import LeadershipLost
from rljob_operator.kube.watch import Key
from rljob_operator.observe.observer import Observer
from rljob_operator.reconcile.desired import Desired
from rljob_operator.reconcile.observed import ObservedJob
from rljob_operator.runtime import reconcile_loop
from rljob_operator.runtime.job_queue import JobQueue
from rljob_operator.runtime.reconcile_loop import ReconcileLoop, UnfinishedReconciles, wait_seconds
from rljob_operator.settings import OperatorSettings
from rljob_testing.patience import PATIENCE_SECONDS
from tests.unit.operator.observe.objects import Object, job

SUMS = ("research", "sums")
SETTINGS = OperatorSettings(trainer_image="trainer:1", trainer_torch_version="2.8.0", reconcile_workers=2)
NONE: dict[str, int] = {}


class Answers(Executor):
    """Fails with the given errors, one per round; then succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.carried_out: list[Desired] = []
        self.forgotten: list[Key] = []
        self.bugs: list[str] = []

    async def execute(self, desired: Desired, observed: ObservedJob) -> None:
        self.carried_out.append(desired)
        if self.errors:
            raise self.errors.pop(0)

    async def report(self, note: EventNote, observed: ObservedJob) -> None:
        self.bugs.append(note.message)

    def forget(self, job: Key) -> None:
        self.forgotten.append(job)


class Loop:
    """Runs the reconcile loop with these jobs, and keeps what each round observed and the records that were written."""

    def __init__(
        self,
        *errors: Exception,
        until: Callable[[Loop], object] = lambda loop: len(loop.observed) >= 2,
        decide: Callable[[ObservedJob], Desired | None] = lambda _: None,
        jobs: Sequence[Object] = (),
        recorded: str = "",
    ) -> None:
        self.observed: list[ObservedJob] = []
        self.records: list[dict[str, int]] = []
        self.executor = Answers(*errors)
        self._decide = decide
        asyncio.run(self._run(jobs or [job()], recorded, until))

    async def _run(self, jobs: Sequence[Object], recorded: str, until: Callable[[Loop], object]) -> None:
        queue = JobQueue()
        self.observer = Observer((), queue.add)
        for stored in jobs:
            self.observer.jobs.put(stored)
        unfinished = UnfinishedReconciles(recorded, self._record)
        loop = ReconcileLoop(SETTINGS, queue, self.observer, self.executor, self._reconcile, unfinished)
        working = asyncio.create_task(loop.run())
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not (until(self) or working.done()):
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
            queue.close()
            await working

    def _reconcile(self, observed: ObservedJob, settings: OperatorSettings, now: datetime) -> Desired:
        self.observed.append(observed)
        return self._decide(observed) or Desired()

    async def _record(self, text: str) -> None:
        self.records.append(json.loads(text))


def is_carried_out(loop: Loop) -> object:
    return loop.executor.carried_out


MISSING_API = {"reason": "NotFound", "message": "the server could not find the requested resource"}


@pytest.mark.parametrize(
    ("error", "field", "expected"),
    [
        (Conflict("changed"), "refused", None),
        (Unavailable("away"), "refused", None),
        (RuntimeError("a mistake"), "refused", None),
        (Forbidden("exceeded quota"), "refused", "exceeded quota"),
        (Invalid("spec.containers: Required value"), "refused", "spec.containers: Required value"),
        (WebhookFailed("failed calling webhook"), "refused", "failed calling webhook"),
        (error_of(404, MISSING_API), "refused", MISSING_API["message"]),
        (NamespaceTerminating("it is being terminated"), "namespace_terminating", True),
        (NamespaceTerminating("it is being terminated"), "refused", None),
        (NameTaken("sums-controller"), "foreign_pods", ("sums-controller",)),
        (ForeignObject("ConfigMap", "sums-rljob"), "foreign_object", "sums-rljob"),
        (LeftBehind("ConfigMap", "sums-rljob"), "left_behind", "sums-rljob"),
        (MissingObject("my-task", "research"), "missing_object", "my-task"),
    ],
)
def test_what_failed_is_tried_again_and_the_next_decision_knows_why(
    error: Exception, field: str, expected: object
) -> None:
    loop = Loop(error)
    found = getattr(loop.observed[1], field)
    assert expected in found if isinstance(found, str) and isinstance(expected, str) else found == expected
    assert len(loop.observer.jobs) == 1


def test_a_refusal_is_over_when_everything_could_be_made_and_not_before() -> None:
    refusals: list[str | None] = []

    def decide(observed: ObservedJob) -> Desired:
        makes = len(refusals) in (0, 2)
        refusals.append(observed.refused)
        return Desired(create=({"kind": "Pod"},) if makes else (), requeue_after_seconds=0.01)

    Loop(Forbidden("exceeded quota"), decide=decide, until=lambda loop: len(loop.observed) >= 4)
    assert refusals[:4] == [None, "exceeded quota", "exceeded quota", None]


@pytest.mark.parametrize(("manager", "reports"), [("rljob.dev/operator", 1), ("kueue.x-k8s.io/multikueue", 0)])
def test_a_mistake_ends_neither_loop_nor_job_and_is_reported_in_own_jobs(manager: str, reports: int) -> None:
    mistakes: list[Exception] = [ZeroDivisionError()]

    def decide(_: ObservedJob) -> None:
        if mistakes:
            raise mistakes.pop()

    stored = job()
    loop = Loop(decide=decide, jobs=[stored | {"spec": stored["spec"] | {"managedBy": manager}}])
    assert loop.executor.carried_out == [Desired()]
    assert ["ZeroDivisionError" in bug for bug in loop.executor.bugs] == [True] * reports


def test_an_error_in_an_observation_ends_neither_the_loop_nor_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def observe(observer: Observer, key: Key) -> Callable[[], ObservedJob] | None:
        if key == SUMS:
            raise RecursionError("too deep")
        return original(observer, key)

    original = Observer.observe
    monkeypatch.setattr(Observer, "observe", observe)
    loop = Loop(jobs=[job(), job("honest", uid="h")], until=is_carried_out)
    assert {observed.name for observed in loop.observed} == {"honest"}
    assert "RecursionError" in loop.executor.bugs[0]


@pytest.mark.parametrize(
    "error",
    [
        JobGone("not found"),
        error_of(404, {"reason": "NotFound", "details": {"name": "research", "kind": "namespaces"}}),
    ],
    ids=["job", "namespace"],
)
def test_a_job_that_is_gone_is_forgotten(error: Exception) -> None:
    loop = Loop(error, until=lambda loop: loop.executor.forgotten)
    assert len(loop.observer.jobs) == 0
    assert loop.executor.forgotten == [SUMS]


def test_a_lost_leadership_ends_the_loop() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        Loop(LeadershipLost("another leads"))
    assert caught.group_contains(LeadershipLost)


# --- slow reconciles, and those that ended the process ---


def test_the_event_loop_runs_while_a_slow_reconcile_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile_loop, "SLOW_SECONDS", 0.0)
    released = threading.Event()

    def until(loop: Loop) -> object:
        if loop.records == [{"research/sums": 1}]:
            released.set()  # on the event loop: a reconcile that ran there would wait for itself
        return is_carried_out(loop)

    def decide(_: ObservedJob) -> None:
        assert released.wait(PATIENCE_SECONDS)

    loop = Loop(decide=decide, until=until)
    assert loop.records == [{"research/sums": 1}, NONE]
    assert loop.executor.bugs == []


def test_a_fast_reconcile_writes_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile_loop, "SLOW_SECONDS", PATIENCE_SECONDS)
    assert Loop(until=is_carried_out).records == []


def test_a_job_over_which_a_process_ended_waits_and_says_so() -> None:
    loop = Loop(
        jobs=[job(), job("honest", uid="h")],
        recorded='{"research/sums": 2}',
        until=lambda loop: loop.observed and loop.executor.bugs,
    )
    assert [observed.name for observed in loop.observed] == ["honest"]
    assert "the operator's process ended 2 times while it reconciled this job" in loop.executor.bugs[0]
    assert loop.records == [], "the record stays for the next process"


def test_a_job_whose_wait_is_over_is_recorded_before_it_is_reconciled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile_loop, "_FIRST_WAIT_SECONDS", 0.0)
    loop = Loop(recorded='{"research/sums": 2}', until=is_carried_out)
    assert loop.records == [{"research/sums": 3}, NONE]


def test_a_deleted_job_does_not_wait() -> None:
    deleted = job()
    deleted["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert Loop(jobs=[deleted], recorded='{"research/sums": 9}', until=is_carried_out).observed


@pytest.mark.parametrize("text", ["", "{}", "[]", "nonsense", '{"a/b/c": 1}', '{"a/b": "x"}', '{"a/b": null}', "5"])
def test_a_record_of_another_form_counts_as_empty(text: str) -> None:
    assert UnfinishedReconciles(text).deaths(("a", "b")) == 0


def test_jobs_that_are_gone_leave_the_record() -> None:
    async def record(text: str) -> None:
        records.append(json.loads(text))

    records: list[dict[str, int]] = []
    unfinished = UnfinishedReconciles('{"research/sums": 1, "research/gone": 4}', record)
    asyncio.run(unfinished.keep_only({SUMS}))
    assert records == [{"research/sums": 1}]
    assert (unfinished.deaths(("research", "gone")), unfinished.deaths(SUMS)) == (0, 1)


def test_the_wait_doubles_with_each_process_up_to_ten_minutes() -> None:
    assert [wait_seconds(deaths) for deaths in (1, 2, 3, 50)] == [30.0, 60.0, 120.0, 600.0]
