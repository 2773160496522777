"""Contents of the StepReport, and its sending: at its own pace, independently of the API server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.plan_change import DiagnosisStatus, Phase
from rljob_api.step_report import MAX_RANKS_REPORTED, Evidence, MemoryPressure, StepReport, StepReportStatus
from rljob_memory.sample import MemorySample
from rljob_testing.memory_plans import memory_facts, memory_plan
from rljob_testing.patience import PATIENCE_SECONDS, Deadline
from rljob_trainer.step_report import reporter as reporter_module
from rljob_trainer.step_report.api_server import NoAnswer, encoded
from rljob_trainer.step_report.reporter import (
    INTERVAL_SECONDS,
    SendSchedule,
    StepReporter,
    memory_of_ranks,
)
from tests.unit.ledger.samples import evaluation_record, plan_change, plan_change_record, step_record

PLAN = memory_plan()
NOW = datetime(2026, 1, 2, tzinfo=UTC)
EVIDENCE = Evidence(time=NOW, attempt=1, role="policy", rank=0, step=2, phase="update", message="CUDA out of memory")


# --- contents ---


def sample(**changes: int) -> MemorySample:
    """Has another number in each field of a report."""
    names = [field.name for field in fields(MemorySample) if str(field.type) == "int"]
    numbers: dict[str, Any] = {name: number for number, name in enumerate(names, start=1)}
    return MemorySample(**numbers | changes)


def test_each_process_is_reported_with_the_phase_of_its_peaks() -> None:
    [policy, rollout] = memory_of_ranks({"policy-1": {"update": sample()}, "rollout-0": {"rollout": sample()}})
    assert (policy.role, policy.rank, policy.phase) == ("policy", 1, "update")
    assert (rollout.role, rollout.rank, rollout.phase) == ("rollout", 0, "rollout")
    numbers = policy.model_dump(exclude={"role", "rank", "phase"})
    assert len(numbers) == 15
    assert numbers == {name: getattr(sample(), name) for name in numbers}


def test_of_too_many_processes_those_with_least_memory_are_reported() -> None:
    ranks = range(MAX_RANKS_REPORTED + 50)
    reported = memory_of_ranks({f"policy-{rank}": {"update": sample(device_free_bytes=1000 - rank)} for rank in ranks})
    assert len(reported) == MAX_RANKS_REPORTED
    assert {entry.rank for entry in reported} == set(range(50, MAX_RANKS_REPORTED + 50))


def test_a_missing_reward_is_omitted_and_an_absent_phase_took_no_time() -> None:
    store = StoredReports()
    reporter = reporter_of(store)
    reporter.step_committed(step_record(1, reward=float("nan")), {})
    reporter.close(PATIENCE_SECONDS)
    report = store.applied[-1]
    assert (report.step, report.reward) == (1, None)
    assert report.seconds is not None
    assert (report.seconds.rollout, report.seconds.update, report.seconds.checkpoint) == (0.6, 0.3, 0.0)


def test_evaluations_are_reported_and_outlive_the_attempt() -> None:
    store = StoredReports()
    reporter = reporter_of(store)
    reporter.evaluated(evaluation_record(20, 0.5))
    reporter.evaluated(evaluation_record(40, 0.25, best=(20, 0.5)))
    reporter.close(PATIENCE_SECONDS)
    found = store.applied[-1].evaluation
    assert found is not None
    assert (found.last.step, found.last.score, found.best.step, found.best.score) == (40, 0.25, 20, 0.5)
    store.existing = store.applied[-1]
    later = reporter_of(store)
    later.step_committed(step_record(41), {})
    later.close(PATIENCE_SECONDS)
    assert store.applied[-1].evaluation == found


def test_a_shortage_within_a_step_is_reported_at_once_and_before_the_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    def pressure(class_name: str, **numbers: int) -> MemoryPressure:
        diagnosis = DiagnosisStatus(class_name=class_name, confidence=0.9, message="it grows", numbers=numbers)
        return MemoryPressure(diagnosis=diagnosis, role="policy", steps_left=9)

    monkeypatch.setattr(reporter_module, "INTERVAL_SECONDS", 3600.0)
    store = StoredReports()
    reporter = reporter_of(store)
    store.wait_for(1)
    forecast, shortage = pressure("RetainedGraph"), pressure("HostMemory", limit_bytes=8 << 30)
    reporter.pressure(forecast)
    reporter.shortage(shortage)
    assert store.wait_for(2).memory_pressure == shortage
    reporter.pressure(forecast)
    reporter.shortage(None)
    reporter.close(PATIENCE_SECONDS)
    assert store.applied[-1].memory_pressure == forecast


def test_the_report_is_small_and_sent_without_defaults() -> None:
    gpu = sample(**{field.name: 80 * 2**30 for field in fields(MemorySample) if field.name.endswith("bytes")})
    phases: dict[str, Phase] = {"policy": "update", "rollout": "rollout"}
    memory = {f"{role}-{rank}": {phase: gpu} for rank in range(8) for role, phase in phases.items()}
    report = StepReportStatus(attempt=1, step=0, plan=PLAN, update_time=NOW, memory=memory_of_ranks(memory))
    assert len(encoded("digits", report)) < 11_000
    sent = json.loads(encoded("digits", report))
    assert sent["metadata"] == {"name": "digits"}, "an apply would claim, or clear, all other fields"
    assert sent["kind"] == "StepReport"
    assert sent["status"]["step"] == 0
    assert "reward" not in sent["status"]
    assert StepReport.model_validate_json(encoded("digits", report)).status == report


# --- schedule ---


def test_regular_reports_wait_for_the_interval_and_urgent_ones_do_not() -> None:
    schedule = SendSchedule()
    assert schedule.wait_seconds(100.0, urgent=False) == 0
    schedule.succeeded(100.0)
    assert schedule.wait_seconds(101.0, urgent=True) == 0
    assert schedule.wait_seconds(101.0, urgent=False) == INTERVAL_SECONDS - 1
    assert schedule.wait_seconds(100.0 + INTERVAL_SECONDS, urgent=False) == 0


def test_after_failures_urgent_reports_back_off_up_to_a_minute() -> None:
    schedule = SendSchedule()
    waits = []
    for _ in range(8):
        schedule.failed(100.0)
        waits.append(schedule.wait_seconds(100.0, urgent=True))
    assert waits == [5, 10, 20, 40, 60, 60, 60, 60]
    schedule.succeeded(200.0)
    schedule.failed(200.0)
    assert schedule.wait_seconds(200.0, urgent=True) == 5, "a success resets the backoff"
    schedule.failed(200.0, retry_after_seconds=90.0)
    assert schedule.wait_seconds(200.0, urgent=True) == 90, "as the API server requested"


@given(st.lists(st.floats(0.0, 3.0), min_size=10, max_size=100))
def test_regular_reports_always_keep_their_interval(pauses: list[float]) -> None:
    schedule, now, sent = SendSchedule(), 0.0, []
    for pause in pauses:
        now += pause
        if schedule.wait_seconds(now, urgent=False) == 0:
            schedule.succeeded(now)
            sent.append(now)
    rounding = 1e-9
    assert all(later - earlier >= INTERVAL_SECONDS - rounding for earlier, later in pairwise(sent))


# --- the reporter ---


class StoredReports:
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

    def wait_for(self, count: int) -> StepReportStatus:
        deadline = Deadline(PATIENCE_SECONDS)
        while len(self.applied) < count:
            assert not deadline.passed, self.applied
            time.sleep(0.005)
        assert len(self.applied) == count
        return self.applied[-1]


def reporter_of(store: StoredReports, warn: Callable[[str], Any] = print, committed: int = 0) -> StepReporter:
    reporter = StepReporter(store, attempt=2)
    reporter.attempt_began(PLAN, [step_record(step) for step in range(1, committed + 1)], warn)
    return reporter


def test_steps_wait_for_the_interval_and_changes_are_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter_module, "INTERVAL_SECONDS", 3600.0)
    store = StoredReports()
    reporter = reporter_of(store, committed=2)
    report = store.wait_for(1)
    assert (report.attempt, report.plan, report.plan_generation) == (2, PLAN, PLAN.generation)
    assert (report.step, report.reward, report.tokens_per_second) == (2, 0.5, 1000.0)
    assert report.update_time is not None
    reporter.memory_facts_found(memory_facts(), [plan_change(2, seconds=1.0)])
    for step in range(3, 101):
        reporter.phase_began(step, "rollout")
        reporter.step_committed(step_record(step, reward=step / 100), {})
    reporter.failed(EVIDENCE)
    report = store.wait_for(2)
    assert (report.step, report.reward, report.last_evidence) == (100, 1.0, EVIDENCE)
    assert report.memory_facts == memory_facts()
    reporter.plan_changed(plan_change(3, step=5), plan_change_record(3, micro_batch_tokens=1024).plan)
    report = store.wait_for(3)
    assert report.plan is not None
    assert (report.plan_generation, report.plan.micro_batch_tokens) == (3, 1024)
    reporter.recovered(plan_change(3, step=5, seconds=2.5))
    report = store.wait_for(4)
    assert [(c.generation, c.seconds_to_recover) for c in report.plan_changes] == [(2, 1.0), (3, 2.5)]
    reporter.step_committed(step_record(101), {})
    reporter.close(PATIENCE_SECONDS)
    assert store.wait_for(5).step == 101


def test_evidence_of_an_earlier_attempt_is_kept_in_regular_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter_module, "INTERVAL_SECONDS", 0.05)
    store = StoredReports(existing=StepReportStatus(last_evidence=EVIDENCE))
    reporter = reporter_of(store)
    store.wait_for(1)
    reporter.step_committed(step_record(1), {})
    report = store.wait_for(2)
    assert (report.step, report.last_evidence) == (1, EVIDENCE)
    reporter.close(PATIENCE_SECONDS)
    assert len(store.applied) == 2, "nothing is sent if nothing changes"


def test_the_loop_does_not_wait_for_an_api_server_that_hangs() -> None:
    released = threading.Event()
    began = time.monotonic()
    reporter = reporter_of(StoredReports(before=lambda: released.wait(PATIENCE_SECONDS)))
    for step in range(1, 1001):
        reporter.step_committed(step_record(step), {})
    reporter.close(0.3)
    assert time.monotonic() - began < PATIENCE_SECONDS, "the end is bounded too"
    released.set()


def failing(*failures: Exception) -> tuple[StoredReports, threading.Event]:
    """A store whose first writes fail, and an event at the first failure."""
    left, failed = list(failures), threading.Event()

    def fail() -> None:
        if left:
            failed.set()
            raise left.pop(0)

    return StoredReports(before=fail), failed


def test_failures_are_logged_once_a_minute_and_reporting_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter_module, "INTERVAL_SECONDS", 0.01)
    store, _ = failing(*[NoAnswer("the API server answered 403: no"), RuntimeError("unexpected")] * 2)
    warnings: list[str] = []
    reporter = reporter_of(store, warnings.append)
    store.wait_for(1)
    reporter.close(PATIENCE_SECONDS)
    [warning] = warnings
    assert "403: no" in warning
    assert "training continues" in warning


def test_close_tries_to_send_the_last_state_during_a_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter_module, "INTERVAL_SECONDS", 3600.0)
    store, failed = failing(*[NoAnswer("it cannot be reached")] * 2)  # before and after the call of `close`
    reporter = reporter_of(store)
    assert failed.wait(PATIENCE_SECONDS)
    reporter.step_committed(step_record(1), {})
    reporter.close(PATIENCE_SECONDS)
    assert [report.step for report in store.applied] == [1]
