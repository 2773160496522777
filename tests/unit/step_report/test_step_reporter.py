"""The StepReporter sends the latest state at its own pace, independently of the API server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from rljob_api.step_report import Evidence, StepReportStatus
from rljob_testing.memory_plans import memory_plan
from rljob_testing.patience import PATIENCE_SECONDS, Deadline
from rljob_trainer.step_report import reporter as reporter_module
from rljob_trainer.step_report import schedule as schedule_module
from rljob_trainer.step_report.api_server import NoAnswer
from rljob_trainer.step_report.reporter import StepReporter
from tests.unit.ledger.samples import step_record

PLAN = memory_plan()

NOW = datetime(2026, 1, 2, tzinfo=UTC)


class Store:
    """Stores the reports. `before`: called before each apply."""

    def __init__(self, existing: StepReportStatus | None = None, before: Callable[[], object] = lambda: None) -> None:
        self.existing = existing
        self.before = before
        self.applied: list[StepReportStatus] = []

    def read(self) -> StepReportStatus | None:
        return self.existing

    def apply(self, report: StepReportStatus) -> None:
        self.before()
        self.applied.append(report)

    def wait_for(self, count: int) -> None:
        deadline = Deadline(PATIENCE_SECONDS)
        while len(self.applied) < count:
            assert not deadline.passed, self.applied
            time.sleep(0.005)


@pytest.fixture(autouse=True)
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_module, "INTERVAL_SECONDS", 0.2)


def evidence() -> Evidence:
    return Evidence(time=NOW, attempt=1, role="policy", rank=0, step=2, phase="update", message="CUDA out of memory")


def ignore(_text: str) -> None:
    pass


def test_the_first_report_has_the_plan_and_the_committed_steps() -> None:
    store = Store()
    reporter = StepReporter(store, attempt=2)
    reporter.attempt_began(PLAN, [step_record(1), step_record(2, reward=0.75)], ignore)
    store.wait_for(1)
    [report] = store.applied
    assert (report.attempt, report.plan, report.plan_generation) == (2, PLAN, PLAN.generation)
    assert (report.step, report.reward, report.tokens_per_second) == (2, 0.75, 1000.0)
    assert report.update_time is not None
    reporter.close(PATIENCE_SECONDS)


def test_many_quick_steps_make_few_reports_and_the_last_one_is_whole() -> None:
    store = Store()
    reporter = StepReporter(store, attempt=1)
    reporter.attempt_began(PLAN, [], ignore)
    store.wait_for(1)
    began = time.monotonic()
    for step in range(1, 101):
        reporter.phase_began(step, "rollout")
        reporter.step_committed(step_record(step, reward=step / 100), {})
        time.sleep(0.005)
    took = time.monotonic() - began
    reporter.close(PATIENCE_SECONDS)
    assert len(store.applied) <= 1 + took / 0.2 + 1 + 1
    assert (store.applied[-1].step, store.applied[-1].reward) == (100, 1.0)


def test_nothing_is_sent_while_nothing_changes() -> None:
    store = Store()
    reporter = StepReporter(store, attempt=1)
    reporter.attempt_began(PLAN, [], ignore)
    store.wait_for(1)
    time.sleep(0.5)
    reporter.close(PATIENCE_SECONDS)
    assert len(store.applied) == 1


def test_evidence_is_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_module, "INTERVAL_SECONDS", 60.0)
    store = Store()
    reporter = StepReporter(store, attempt=1)
    reporter.attempt_began(PLAN, [], ignore)
    store.wait_for(1)
    reporter.failed(evidence())
    store.wait_for(2)
    assert store.applied[-1].last_evidence == evidence()
    reporter.close(PATIENCE_SECONDS)


def test_evidence_of_an_earlier_attempt_is_kept() -> None:
    store = Store(existing=StepReportStatus(last_evidence=evidence()))
    reporter = StepReporter(store, attempt=2)
    reporter.attempt_began(PLAN, [], ignore)
    reporter.close(PATIENCE_SECONDS)
    assert store.applied[-1].last_evidence == evidence()


def test_the_loop_does_not_wait_for_an_api_server_that_hangs() -> None:
    released = threading.Event()
    store = Store(before=lambda: released.wait(PATIENCE_SECONDS))
    reporter = StepReporter(store, attempt=1)
    began = time.monotonic()
    reporter.attempt_began(PLAN, [], ignore)
    for step in range(1, 1001):
        reporter.step_committed(step_record(step), {})
    reporter.close(0.3)
    assert time.monotonic() - began < PATIENCE_SECONDS, "the end is bounded too"
    released.set()


def test_failures_are_logged_once_a_minute_and_reporting_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_module, "_LONGEST_BACKOFF_SECONDS", 0.01)
    failures = iter([NoAnswer("the API server answered 403: no"), RuntimeError("unexpected")] * 2)

    def fail() -> None:
        for failure in failures:
            raise failure

    store = Store(before=fail)
    warnings: list[str] = []
    reporter = StepReporter(store, attempt=1)
    reporter.attempt_began(PLAN, [], warnings.append)
    store.wait_for(1)
    reporter.close(PATIENCE_SECONDS)
    assert len(warnings) == 1
    assert "403: no" in warnings[0]
    assert "training continues" in warnings[0]
    assert reporter_module._WARN_EVERY_SECONDS == 60


def test_close_tries_to_send_the_last_state_during_a_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_module, "INTERVAL_SECONDS", 3600.0)
    failures = iter([NoAnswer("the API server cannot be reached")] * 2)  # before and after the call of `close`
    failed = threading.Event()

    def fail() -> None:
        for failure in failures:
            failed.set()
            raise failure

    store = Store(before=fail)
    reporter = StepReporter(store, attempt=1)
    reporter.attempt_began(PLAN, [], ignore)
    assert failed.wait(PATIENCE_SECONDS)
    reporter.step_committed(step_record(1), {})
    reporter.close(PATIENCE_SECONDS)
    assert [report.step for report in store.applied] == [1]
