"""One round for one job: what comes of decisions, refusals, conflicts and mistakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime

import pytest

from rljob_operator.apply.executor import Executor, JobGone, MissingObject, NameTaken
from rljob_operator.apply.ownership import ForeignObject, LeftBehind
from rljob_operator.kube.errors import (
    ApiError,
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
from rljob_operator.observation import Observation
from rljob_operator.observe.observer import Observer
from rljob_operator.reconcile.bug_report import BugReport
from rljob_operator.reconcile.desired import Desired, RequiredObject
from rljob_operator.reconcile.observed import Observed
from rljob_operator.runtime.reconcile_loop import Reconcile, ReconcileLoop
from rljob_operator.runtime.work_queue import WorkQueue
from rljob_operator.settings import OperatorSettings
from tests.unit.operator.observe.objects import Object, job

SUMS = ("research", "sums")
SETTINGS = OperatorSettings(trainer_image="trainer:1", trainer_torch_version="2.8.0", reconcile_workers=2)


class Answers(Executor):
    """Fails with the given errors, one per round; then succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.carried_out: list[Desired] = []
        self.forgotten: list[Key] = []
        self.bugs: list[str] = []

    async def execute(self, desired: Desired, observation: Observation) -> None:
        self.carried_out.append(desired)
        if self.errors:
            raise self.errors.pop(0)

    async def report(self, bug: BugReport, observation: Observation) -> None:
        self.bugs.append(bug.event.message)

    def forget(self, job: Key) -> None:
        self.forgotten.append(job)


class Rounds:
    """Runs the loop until so many rounds were made; keeps what each of them observed."""

    def __init__(
        self,
        executor: Executor,
        rounds: int,
        decide: Callable[[Observed], Desired] | None = None,
        jobs: Sequence[Object] = (),
    ) -> None:
        self._jobs = jobs or [job()]
        self.observed: list[Observed] = []
        enough = asyncio.Event()

        def reconcile(observed: Observed, settings: OperatorSettings, now: datetime) -> Desired:
            self.observed.append(observed)
            if len(self.observed) == rounds:
                enough.set()
            return decide(observed) if decide else Desired()

        asyncio.run(self._run(executor, reconcile, enough))

    async def _run(self, executor: Executor, reconcile: Reconcile, enough: asyncio.Event) -> None:
        queue = WorkQueue()
        self.observer = Observer((), queue.add)
        for stored in self._jobs:
            self.observer.jobs.put(stored)
        loop = asyncio.create_task(ReconcileLoop(SETTINGS, queue, self.observer, executor, reconcile).run())
        waiting = asyncio.create_task(enough.wait())
        async with asyncio.timeout(60):
            await asyncio.wait((loop, waiting), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0.01)
            queue.close()
            await loop


@pytest.mark.parametrize("error", [Conflict("changed"), Unavailable("away"), RuntimeError("a mistake")])
def test_what_may_work_later_is_tried_again(error: Exception) -> None:
    rounds = Rounds(Answers(error), rounds=2)
    assert rounds.observed[1].refused is None


def test_a_mistake_in_a_decision_ends_neither_the_loop_nor_the_job() -> None:
    def decide(_: Observed) -> Desired:
        if not mistakes:
            mistakes.append(ZeroDivisionError())
            raise mistakes[0]
        return Desired()

    mistakes: list[Exception] = []

    executor = Answers()
    Rounds(executor, rounds=2, decide=decide)
    assert executor.carried_out == [Desired()]
    assert "ZeroDivisionError" in executor.bugs[0]


def test_an_error_in_an_observation_ends_neither_the_loop_nor_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def observe(observer: Observer, key: Key) -> Observation | None:
        if key == SUMS:
            raise RecursionError("too deep")
        return original(observer, key)

    original = Observer.observe
    monkeypatch.setattr(Observer, "observe", observe)
    executor = Answers()
    rounds = Rounds(executor, rounds=1, jobs=[job(), job("honest", uid="h")])
    assert [observed.name for observed in rounds.observed] == ["honest"]
    assert "RecursionError" in executor.bugs[0]


@pytest.mark.parametrize(
    "error",
    [Forbidden("exceeded quota"), Invalid("spec.containers: Required value"), WebhookFailed("failed calling webhook")],
)
def test_the_next_decision_knows_what_was_refused(error: ApiError) -> None:
    assert Rounds(Answers(error), rounds=2).observed[1].refused == error.message


def test_the_next_decision_knows_that_the_namespace_goes() -> None:
    rounds = Rounds(Answers(NamespaceTerminating("it is being terminated")), rounds=2)
    assert rounds.observed[1].namespace_terminating
    assert rounds.observed[1].refused is None


def test_the_next_decision_knows_the_pod_in_the_way() -> None:
    assert Rounds(Answers(NameTaken("sums-controller")), rounds=2).observed[1].foreign_pods == ("sums-controller",)


def test_a_refusal_is_over_when_everything_could_be_made_and_not_before() -> None:
    def decide(observed: Observed) -> Desired:
        makes = len(rounds_seen) in (0, 2)
        rounds_seen.append(observed.refused)
        return Desired(create=({"kind": "Pod"},) if makes else (), requeue_after_seconds=0.01)

    rounds_seen: list[str | None] = []
    Rounds(Answers(Forbidden("exceeded quota")), rounds=4, decide=decide)
    assert rounds_seen[:4] == [None, "exceeded quota", "exceeded quota", None]


def test_a_job_that_is_gone_is_forgotten() -> None:
    executor = Answers(JobGone("not found"))
    rounds = Rounds(executor, rounds=1)
    assert len(rounds.observer.jobs) == 0
    assert executor.forgotten == [SUMS]


def test_a_job_whose_namespace_is_gone_is_forgotten() -> None:
    assert len(Rounds(Answers(error_of(404, NAMESPACE_GONE)), rounds=1).observer.jobs) == 0


NAMESPACE_GONE = {"reason": "NotFound", "details": {"name": "research", "kind": "namespaces"}}


def test_any_other_missing_object_or_api_is_a_refusal_that_is_retried() -> None:
    missing = {"reason": "NotFound", "message": "the server could not find the requested resource"}
    rounds = Rounds(Answers(error_of(404, missing)), rounds=2)
    assert len(rounds.observer.jobs) == 1
    assert rounds.observed[1].refused == missing["message"]


def test_the_next_decision_knows_the_foreign_object() -> None:
    observed = Rounds(Answers(ForeignObject("ConfigMap", "sums-rljob")), rounds=2).observed[1]
    assert "sums-rljob" in (observed.foreign_object or "")


def test_the_next_decision_knows_the_missing_object() -> None:
    missing = MissingObject("ConfigMap", RequiredObject("my-task", "research", "spec.task.files.configMap"))
    assert "my-task" in (Rounds(Answers(missing), rounds=2).observed[1].missing_object or "")


def test_the_next_decision_knows_what_a_deleted_job_left_behind() -> None:
    observed = Rounds(Answers(LeftBehind("ConfigMap", "sums-rljob")), rounds=2).observed[1]
    assert "sums-rljob" in (observed.left_behind or "")


def test_a_lost_leadership_ends_the_loop() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        Rounds(Answers(LeadershipLost("another leads")), rounds=9)
    assert caught.group_contains(LeadershipLost)


def test_it_looks_again_when_the_decision_says_so() -> None:
    rounds = Rounds(Answers(), rounds=3, decide=lambda _: Desired(requeue_after_seconds=0.01))
    assert len(rounds.observed) >= 3
