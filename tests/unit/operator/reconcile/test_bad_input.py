"""Bad input of users and programs ends in a condition: never in a crash, a hot loop, or many status writes."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from rljob_api.api_model import MAX_INTEGER
from rljob_api.conditions import ConditionType
from rljob_api.plan_change import DiagnosisStatus, PlanChange, RemedyStatus
from rljob_api.status import AttemptStatus, RLJobStatus
from rljob_operator.reconcile.desired import Desired
from rljob_operator.reconcile.status import BURST, MAX_STATUS_BYTES, SECONDS_PER_WRITE, bounded
from rljob_operator.reconcile.view import usable_report
from rljob_testing.simulated_cluster import (
    CONTROLLER,
    PLAN,
    POLICY_0,
    POLICY_1,
    START,
    SimulatedCluster,
    new_job,
    running_job,
)

UNREADABLE: dict[str, Any] = {"problem": "spec.rollout.engineArgs: must not set model"}


# --- specs ---


def test_an_unreadable_spec_is_reported_and_resumes_once_fixed() -> None:
    cluster = new_job(facts=UNREADABLE)
    assert cluster.settle() == Desired()
    cluster.expect(phase="Invalid", stalled=(True, "InvalidSpec"), stalled_contains="must not set model", failed=False)
    cluster.observes().run().expect(phase="Running", stalled=False)


def test_a_spec_that_is_spoilt_while_the_job_runs_leaves_the_pods_alone() -> None:
    cluster = running_job().observes(**UNREADABLE)
    cluster.settled(phase="Running", stalled="InvalidSpec", stalled_contains="the running attempt keeps its spec")
    cluster.end(CONTROLLER, 1, message="it broke", step=30).end(POLICY_0, 83).end(POLICY_1, 83)
    cluster.settled(phase="Invalid", end_time=None).observes()
    cluster.next_attempt_runs().expect(phase="Running", from_step=31).observes(**UNREADABLE)
    cluster.end(CONTROLLER, 0).end(POLICY_0, 0).end(POLICY_1, 0).settled(phase="Invalid")
    cluster.observes().settled(phase="Complete", failed=False)


def test_an_unmergeable_template_is_an_invalid_spec_that_can_be_suspended() -> None:
    cluster = new_job(policy={"template": {"spec": {"containers": "rljob"}}})
    assert cluster.settle() == Desired()
    cluster.expect(stalled="InvalidSpec", pods=set())
    assert cluster.events == ["InvalidSpec"]
    assert cluster.change_spec(suspend=True).settle() == Desired()
    cluster.expect(phase="Suspended").change_spec(policy={"replicas": 2}, suspend=False)
    cluster.run().expect(phase="Running", stalled=False)


# --- statuses ---


def test_a_lost_status_is_derived_again_from_pods_and_report() -> None:
    cluster = running_job().end(CONTROLLER, 1, message="it broke", step=5).next_attempt_runs().reports(20)
    pods = dict(cluster.pods)
    cluster.set_status(None).settled(number=2, phase="Running", step=20)
    assert cluster.pods == pods, "nothing was restarted"
    cluster.complete().set_status(RLJobStatus()).settled(phase="Complete", pods={CONTROLLER})


def test_a_job_that_is_called_complete_by_hand_goes_on() -> None:
    cluster = running_job()
    complete = cluster.condition(ConditionType.COMPLETE).model_copy(update={"status": "True"})
    others = [it for it in cluster.stored.conditions if it.type != complete.type]
    cluster.set_status(cluster.stored.model_copy(update={"conditions": [*others, complete]}))
    cluster.next_attempt_runs().expect(phase="Running")


def test_times_to_come_do_not_stop_a_job() -> None:
    cluster = running_job().end(CONTROLLER, 1, message="it broke", step=0).stop()
    never = cluster.now.replace(year=9999)
    attempt = cluster.attempt.model_copy(update={"end_time": never})
    cluster.set_status(cluster.stored.model_copy(update={"attempts": [attempt], "update_time": never}))
    cluster.settled().tick(10).run().expect(phase="Running")


# --- objects of others, and refusals ---

TAKEN = "PersistentVolumeClaim demo-checkpoints exists and does not belong to this job"
MISSING = "expected ConfigMap my-task (spec.task.files.configMap) in namespace demo, found none: create it"
QUOTA = 'pods "demo-controller" is forbidden: exceeded quota: gpus, requested: 1, limited: 0'


@pytest.mark.parametrize(
    ("facts", "reason", "message", "events"),
    [
        ({"foreign_object": TAKEN}, "ForeignObject", TAKEN, ["ForeignObject"]),
        ({"missing_object": MISSING}, "MissingObject", MISSING, []),
        ({"refused": QUOTA}, "PodsRefused", "exceeded quota", []),
        ({"foreign_pods": (POLICY_0,)}, "ForeignPod", POLICY_0, []),
    ],
)
def test_an_obstacle_is_named_once_and_tried_again_later(
    facts: dict[str, Any], reason: str, message: str, events: list[str]
) -> None:
    cluster = new_job()
    cluster.round()
    first = cluster.observes(**facts).round()
    assert (first.create, first.delete_pods) == ((), ())
    cluster.settled(scheduled=(False, reason), scheduled_contains=message, pods=set(), wait=30)
    again = cluster.tick(31).round()
    assert again.create, "it may be gone"
    assert again.requeue_after_seconds == 30
    assert cluster.events == events
    cluster.observes().run().expect(phase="Running")


def test_a_foreign_pod_that_only_has_our_labels_is_no_hindrance() -> None:
    cluster = running_job(facts={"foreign_pods": ("other",)}).expect(phase="Running")
    assert cluster.events == ["ForeignPodIgnored"]


def test_an_object_left_behind_is_reported_after_a_minute_with_advice() -> None:
    left = "StepReport demo belongs to a deleted job of this name; waiting for its garbage collection"
    cluster = new_job()
    cluster.round()
    cluster.observes(left_behind=left)
    for seconds, reason in ((30, "WaitingForPods"), (29, "WaitingForPods"), (1, "ObjectLeftBehind")):
        assert "ObjectLeftBehind" not in cluster.events
        cluster.tick(seconds)
        for _ in range(3):
            assert cluster.round().create
            cluster.pods.clear()  # they cannot be created before the other objects
        cluster.expect(scheduled=reason, scheduled_contains=left)
    cluster.expect(scheduled_contains="finalizers")
    assert cluster.events.count("ObjectLeftBehind") == 1


# --- content of reports ---


def test_an_unusable_step_report_is_reported_once() -> None:
    cluster = running_job().reports(5_000_000).settled().tick(60)
    cluster.settled(phase="Running", running="StepReportIgnored")
    assert cluster.events.count("StepReportIgnored") == 1
    cluster.reports(6).tick(60).settled(running="StepsCommitted", step=6)
    cluster.tick(10).reports(4).settled(step=6)  # a late report never takes steps back


def test_a_report_from_the_future_or_from_before_the_job_is_not_believed() -> None:
    cluster = running_job().reports(6, attempt=9).settled(running="StepReportIgnored", step=None, plan=None)
    cluster.reports(3, plan=PLAN.model_copy(update={"generation": MAX_INTEGER}))
    cluster.settled(running="StepReportIgnored", plan=None)
    cluster = new_job().reports(60, attempt=7, reward=1.0).settled(step=None, reward=None, plan=None, from_step=1)
    cluster.expect(number=8)  # attempts are numbered after those reported, even if the status is lost


@pytest.mark.parametrize(
    ("reported", "read"),
    [
        (START - timedelta(days=1), START - timedelta(hours=1)),
        (START + timedelta(minutes=90), START + timedelta(minutes=90)),
        (datetime.fromisoformat("0001-01-01T00:00:00+14:00"), START - timedelta(hours=1)),
        (datetime.fromisoformat("9999-12-31T23:59:59-14:00"), START + timedelta(hours=2)),
    ],
)
def test_times_lie_between_creation_and_now_or_an_hour_beyond(reported: datetime, read: datetime) -> None:
    cluster = running_job()
    changes = [change(2, "m").model_copy(update={"time": reported})]
    cluster.reports(3, update_time=reported, plan_changes=changes, seconds={"rollout": 1.0})
    report, _ = usable_report(cluster.observe(), 60, START + timedelta(hours=1))
    assert report is not None
    assert report.update_time == report.plan_changes[0].time == read
    cluster.settled().tick(2000).settled(step=3)


# --- the rate of writes ---


def flip(cluster: SimulatedCluster, count: int, seconds: float = 0.0) -> None:
    """Report memory pressure and no memory pressure in turn."""
    diagnosis = DiagnosisStatus(class_name="Fragmentation", confidence=1.0, message="m")
    pressure = {"diagnosis": diagnosis, "role": "policy", "steps_left": 1}
    for index in range(count):
        cluster.tick(seconds).reports(1, memory_pressure=pressure if index % 2 == 0 else None).round()


def test_reports_cause_a_burst_of_writes_and_then_one_in_two_seconds() -> None:
    cluster = running_job().tick(600)
    before = cluster.status_writes
    flip(cluster, 200)
    assert cluster.status_writes - before == BURST
    assert cluster.events.count("MemoryPressure") <= BURST
    flip(cluster, 100, seconds=1.0)
    assert cluster.status_writes - before <= BURST + 100 / SECONDS_PER_WRITE + 1


def test_the_latest_state_is_written_in_the_end_and_decisions_at_once() -> None:
    cluster = running_job().tick(600)
    flip(cluster, 201)  # the last one reports pressure
    cluster.expect(memory_pressure=False)
    assert cluster.last.is_status_delayed
    assert 0 < (cluster.last.requeue_after_seconds or 0) <= SECONDS_PER_WRITE
    cluster.tick(SECONDS_PER_WRITE).settled(memory_pressure=True)
    flip(cluster, 100)
    assert cluster.change_spec(suspend=True).round().status is not None
    cluster.expect(reason="SuspendRequested")


def test_effects_that_a_trainer_reports_again_and_again_are_bounded_too() -> None:
    cluster = running_job().tick(600)
    before = cluster.status_writes
    for generation in range(2, 102):
        changes = [change(g, "x") for g in range(max(2, generation - 9), generation + 1)]
        cluster.reports(1, plan=PLAN.model_copy(update={"generation": generation}), plan_changes=changes).round()
    assert cluster.status_writes - before <= BURST
    cluster.tick(SECONDS_PER_WRITE).settled(plan=PLAN.model_copy(update={"generation": 101}))


# --- the size of a status ---


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


def test_a_hostile_report_leads_to_a_status_that_can_be_written() -> None:
    changes = [change(generation, "é" * 2048) for generation in range(2, 22)]
    cluster = running_job().reports(1, plan=PLAN.model_copy(update={"generation": 21}), plan_changes=changes)
    decided = cluster.decide()
    assert decided.status is not None
    assert size(decided.status) <= MAX_STATUS_BYTES


def test_a_job_of_1024_pods_keeps_its_status_small() -> None:
    cluster = new_job(policy={"replicas": 1024}, recovery={"maxRestarts": 100})
    cluster.nodes = tuple(replace(node, restarts_in_place=True) for node in cluster.nodes)
    cluster.run()
    for step in (1, 2):
        pending = {"exit_code": 83, "message": "lost a worker"}
        cluster.reports(step, pending_exit=pending, update_time=cluster.now)
        cluster.tick(10).settled().restart().ready().settled()
    cluster.expect(number=3, pods_of_attempt=1)
    assert [len(it.restarts_before) for it in cluster.stored.attempts] == [0, 0, 1025], "kept for the latest only"
    assert size(cluster.stored) < 100_000
