"""No report of a job's pods stops its reconciles, or its status writes, whose rate is bounded."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from rljob_api.api_model import MAX_INTEGER
from rljob_api.conditions import ConditionType
from rljob_api.plan_change import DiagnosisStatus, PlanChange, RemedyStatus
from rljob_api.status import AttemptStatus, RLJobStatus
from rljob_operator.reconcile.reconcile import reconcile
from rljob_operator.reconcile.status_bounds import MAX_STATUS_BYTES, bounded
from rljob_operator.reconcile.trusted_state import usable_report
from rljob_operator.reconcile.write_budget import BURST, SECONDS_PER_WRITE, WriteBudget
from rljob_testing.simulated_cluster import PLAN, START, SimulatedCluster, job_spec

PRESSURE = {
    "diagnosis": DiagnosisStatus(class_name="Fragmentation", confidence=1.0, message="m"),
    "role": "policy",
    "steps_left": 1,
}


# --- times and numbers ---


@pytest.mark.parametrize("time", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
def test_an_impossible_time_stops_no_reconcile(time: str) -> None:
    cluster = SimulatedCluster().run()
    cluster.reports(3, seconds={"rollout": 1.0}, update_time=datetime.fromisoformat(time))
    cluster.settle()
    cluster.tick(2000)
    cluster.settle()
    assert cluster.status is not None
    assert cluster.status.step == 3


@pytest.mark.parametrize(
    ("reported", "read"),
    [
        (START - timedelta(days=1), START - timedelta(hours=1)),
        (START + timedelta(minutes=90), START + timedelta(minutes=90)),
        (START + timedelta(days=9999), START + timedelta(hours=2)),
    ],
)
def test_times_lie_between_creation_and_now_or_an_hour_beyond(reported: datetime, read: datetime) -> None:
    cluster = SimulatedCluster().run()
    cluster.reports(3, update_time=reported, plan_changes=[change(2, "m").model_copy(update={"time": reported})])
    report, _ = usable_report(cluster.observe(), 60, START + timedelta(hours=1))
    assert report is not None
    assert report.update_time == report.plan_changes[0].time == read


def test_a_plan_of_an_absurd_generation_is_not_adopted() -> None:
    cluster = SimulatedCluster().run()
    cluster.reports(3, plan=PLAN.model_copy(update={"generation": MAX_INTEGER}))
    cluster.settle()
    assert cluster.condition(ConditionType.RUNNING).reason == "StepReportIgnored"
    assert cluster.status is not None
    assert cluster.status.plan is None


def test_content_from_before_the_first_attempt_is_not_believed() -> None:
    cluster = SimulatedCluster()
    cluster.reports(60, attempt=7, reward=1.0)
    cluster.settle()
    assert cluster.status is not None
    assert (cluster.status.step, cluster.status.reward, cluster.status.plan) == (None, None, None)
    assert cluster.attempt.from_step == 1
    assert cluster.attempt.number == 8, "attempts are numbered after those reported, even if the status is lost"


# --- the rate of writes ---


def flip(cluster: SimulatedCluster, count: int, seconds: float = 0.0) -> None:
    for index in range(count):
        cluster.tick(seconds)
        cluster.reports(1, memory_pressure=PRESSURE if index % 2 == 0 else None)
        cluster.round()


def test_reports_cause_a_burst_of_writes_and_then_one_in_two_seconds() -> None:
    cluster = SimulatedCluster().run()
    cluster.tick(600)
    before = cluster.status_writes
    flip(cluster, 200)
    assert cluster.status_writes - before == BURST
    assert cluster.events.count("MemoryPressure") <= BURST
    flip(cluster, 100, seconds=1.0)
    assert cluster.status_writes - before <= BURST + 100 / SECONDS_PER_WRITE + 1


def test_the_latest_state_is_written_in_the_end() -> None:
    cluster = SimulatedCluster().run()
    cluster.tick(600)
    flip(cluster, 201)  # the last one reports pressure
    assert not cluster.holds(ConditionType.MEMORY_PRESSURE)
    assert cluster.last.is_status_delayed
    assert cluster.last.requeue_after_seconds is not None
    assert 0 < cluster.last.requeue_after_seconds <= SECONDS_PER_WRITE
    cluster.tick(SECONDS_PER_WRITE)
    cluster.settle()
    assert cluster.holds(ConditionType.MEMORY_PRESSURE)


def test_a_change_that_decisions_rest_on_does_not_wait() -> None:
    cluster = SimulatedCluster().run()
    cluster.tick(600)
    flip(cluster, 100)
    cluster.change_spec(suspend=True)
    assert cluster.round().status is not None
    assert cluster.attempt.reason == "SuspendRequested"


def test_effects_that_a_trainer_reports_again_and_again_are_bounded_too() -> None:
    cluster = SimulatedCluster().run()
    cluster.tick(600)
    before = cluster.status_writes
    for generation in range(2, 102):
        changes = [change(g, "x") for g in range(max(2, generation - 9), generation + 1)]
        cluster.reports(1, plan=PLAN.model_copy(update={"generation": generation}), plan_changes=changes)
        cluster.round()
    assert cluster.status_writes - before <= BURST
    cluster.tick(SECONDS_PER_WRITE)
    cluster.settle()
    assert cluster.status is not None
    assert cluster.status.plan is not None
    assert cluster.status.plan.generation == 101


def test_a_budget_refills_at_its_rate_and_not_beyond_the_burst() -> None:
    budget = WriteBudget()
    for _ in range(int(BURST)):
        assert budget.seconds_left(100.0) == 0
        budget = budget.after_write(100.0)
    assert budget.seconds_left(100.0) == SECONDS_PER_WRITE
    assert budget.seconds_left(101.0) == SECONDS_PER_WRITE - 1
    assert budget.seconds_left(102.0) == 0
    for _ in range(int(BURST) + 1):
        budget = budget.after_write(10_000.0)
    assert budget.seconds_left(10_000.0) == SECONDS_PER_WRITE


# --- sizes ---


def change(generation: int, message: str) -> PlanChange:
    numbers = {f"{index:02}{'k' * 62}": MAX_INTEGER for index in range(32)}
    return PlanChange(
        generation=generation,
        time=START,
        attempt=1,
        step=1,
        role="policy",
        level="Live",
        diagnosis=DiagnosisStatus(class_name="Fragmentation", confidence=1.0, message=message, numbers=numbers),
        remedy=RemedyStatus(setting="emptyCache", before="0", after="1"),
    )


def attempt(number: int, **fields: Any) -> AttemptStatus:
    return AttemptStatus(number=number, plan_generation=1, start_time=START, from_step=1, **fields)


def size(status: RLJobStatus) -> int:
    return len(status.model_dump_json(by_alias=True, exclude_none=True).encode())


def test_a_status_is_trimmed_to_its_bound_oldest_first() -> None:
    changes = [change(generation, "\x01" * 2048) for generation in range(2, 22)]
    attempts = [attempt(n, message="\x01" * 1024, diagnosis=changes[0].diagnosis) for n in range(1, 21)]
    full = RLJobStatus(plan_changes=changes, attempts=attempts, adjustments=20)
    assert size(full) > 1.4 * MAX_STATUS_BYTES
    trimmed = bounded(full)
    assert size(trimmed) <= MAX_STATUS_BYTES
    assert trimmed.attempts == attempts[-len(trimmed.attempts) :]
    assert trimmed.plan_changes == changes[-len(trimmed.plan_changes) :]
    assert trimmed.adjustments == 20
    assert bounded(trimmed) == trimmed


def test_restarts_before_an_attempt_are_kept_for_the_latest_only() -> None:
    pods = {"demo-policy-0": 3}
    status = bounded(RLJobStatus(attempts=[attempt(n, restarts_before=pods) for n in (1, 2, 3)]))
    assert [found.restarts_before for found in status.attempts] == [{}, {}, pods]


def test_a_job_of_1024_pods_keeps_its_status_small() -> None:
    cluster = SimulatedCluster(spec=job_spec(policy={"replicas": 1024}, recovery={"maxRestarts": 100}))
    cluster.nodes = tuple(replace(node, restarts_in_place=True) for node in cluster.nodes)
    cluster.run()
    for step in (1, 2):
        pending = {"exit_code": 83, "message": "lost a worker"}
        cluster.reports(step, attempt=cluster.attempt.number, pending_exit=pending, update_time=cluster.now)
        cluster.tick(10)
        cluster.settle()
        cluster.restart()
        cluster.ready()
        cluster.settle()
    assert cluster.attempt.pods_of_attempt == 1
    assert cluster.attempt.number == 3
    assert cluster.status is not None
    assert len(cluster.attempt.restarts_before) == 1025
    assert size(cluster.status) < 100_000


def test_a_hostile_report_leads_to_a_status_that_can_be_written() -> None:
    cluster = SimulatedCluster().run()
    changes = [change(generation, "é" * 2048) for generation in range(2, 22)]
    cluster.reports(1, plan=PLAN.model_copy(update={"generation": 21}), plan_changes=changes)
    decided = reconcile(cluster.observe(), cluster.settings, cluster.now)
    assert decided.status is not None
    assert size(decided.status) <= MAX_STATUS_BYTES
