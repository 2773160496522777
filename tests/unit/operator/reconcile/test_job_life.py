"""A job from `kubectl apply` to its end, and the few writes that it takes."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_operator.reconcile.desired import Desired
from rljob_testing.simulated_cluster import (
    CONTROLLER,
    PLAN,
    POLICY_0,
    POLICY_1,
    SETTINGS,
    SimulatedCluster,
    created_job,
    job_spec,
    rank_memory,
    reasons,
    running_job,
)
from tests.unit.operator.reconcile.memory_failures import FACTS

ALL_PODS = {CONTROLLER, POLICY_0, POLICY_1}


def complete(cluster: SimulatedCluster, step: int = 60) -> None:
    cluster.end(CONTROLLER, 0, sentence="all steps are committed", step=step).settled().finish_deletions()


def test_the_first_round_records_the_attempt_and_the_second_creates_it() -> None:
    cluster = SimulatedCluster()
    first = cluster.round()
    assert first == Desired(claim=cluster.settings.installation, finalizer=True, status=first.status)
    cluster.expect(number=1, start_time=cluster.now, observed_generation=1, phase="Pending")
    assert reasons(cluster.stored.conditions) == {
        "Suspended": "NotSuspended",
        "Scheduled": "WaitingForPods",
        "Running": "Starting",
        "MemoryPressure": "EnoughMemory",
        "Degraded": "NoWarning",
        "Recovering": "NoFailure",
        "Complete": "StepsRemain",
        "Failed": "NoFailure",
        "Ready": "Pending",
        "Stalled": "NotStalled",
    }
    assert all(condition.status == "False" for condition in cluster.stored.conditions)
    second = cluster.round()
    assert second.apply
    assert [manifest["kind"] for manifest in second.create][-3:] == ["Pod"] * 3
    assert (second.status, second.claim, cluster.operator) == (None, None, SETTINGS.installation)
    cluster.expect(pods=ALL_PODS)
    assert cluster.round() == Desired()
    cluster.run().expect(phase="Running", scheduled=True)
    assert (cluster.status_writes, cluster.events) == (2, [])


def test_pods_that_are_placed_and_take_long_to_start_show_as_scheduled() -> None:
    cluster = created_job().place().settled(wait=5, scheduled=False)
    cluster.tick(5).settled(scheduled=True, running=False)
    assert cluster.status_writes == 2


def test_exit_code_0_completes_the_job_and_keeps_the_controller() -> None:
    cluster = running_job().end(POLICY_0, 0)
    cluster.settled(reason=None)  # it may end shortly before the controller
    complete(cluster)
    cluster.expect(phase="Complete", pods={CONTROLLER}, step=60, completion_time=cluster.now)
    cluster.expect(reason="AllStepsCommitted", exit_code=0, to_step=60)
    assert cluster.events[-1] == "JobCompleted"
    assert cluster.settle() == Desired()


def test_steps_raised_on_a_complete_job_take_a_further_attempt() -> None:
    cluster = running_job()
    complete(cluster)
    cluster.raise_steps(90)
    cluster.run().expect(phase="Running", number=2, from_step=61, completion_time=None, restarts=0)
    cluster.expect(complete="StepsRaised")


def test_steps_raised_during_a_run_extend_the_job_afterwards() -> None:
    cluster = running_job().raise_steps(90).settled(pods=ALL_PODS)
    complete(cluster)
    assert cluster.stored.attempts[0].reason == "StepsRaised"
    cluster.next_attempt_runs().expect(from_step=61, restarts=0, recovering=False)


def test_a_trainer_that_completes_without_progress_is_given_up() -> None:
    cluster = running_job(recovery={"maxRestarts": 1})
    complete(cluster, step=0)
    cluster.next_attempt_runs()
    complete(cluster, step=0)
    cluster.expect(failed="RestartsExhausted")


def test_step_reports_reach_the_status_at_most_once_in_the_interval() -> None:
    cluster = running_job()
    before = cluster.status_writes
    cluster.tick(4).reports(1).settled(wait=6)
    cluster.tick(6)
    for step in range(1, 21):
        cluster.reports(step).settled().tick(1)
    assert cluster.status_writes - before == 2
    cluster.tick(10).settled(step=20, reward=0.5)
    assert cluster.stored.display is not None
    assert cluster.stored.display.step == "20/60"


def test_the_plan_comes_from_the_step_report_and_never_goes_back() -> None:
    cluster = running_job()
    for step, reported, known in ((1, 1, 1), (2, 7, 7), (3, 6, 7)):
        cluster.tick(10).reports(step, plan=PLAN.model_copy(update={"generation": reported}))
        cluster.settled(plan=PLAN.model_copy(update={"generation": known}))


def test_a_later_pin_changes_the_plan_of_the_next_attempt() -> None:
    cluster = running_job().tick(10).reports(1, memory_profile=FACTS)
    cluster.change_spec(memory={"microBatchTokens": 1000, "rolloutSleep": "Level1"}).settled(plan=PLAN)
    cluster.end(CONTROLLER, 83, sentence="a worker was lost", step=1).tick(20)
    pinned = {"generation": 2, "micro_batch_tokens": 1000, "rollout_sleep": "Level1"}
    cluster.next_attempt_runs().expect(plan=PLAN.model_copy(update=pinned), plan_generation=2)


def test_memory_is_that_of_the_fullest_gpu() -> None:
    cluster = running_job().tick(10)
    fullest = rank_memory(rank=1, device_free_bytes=40 << 30)
    cluster.reports(1, memory=[rank_memory(), fullest, rank_memory(rank=2, device_total_bytes=0)]).settled()
    memory, display = cluster.stored.memory, cluster.stored.display
    assert memory is not None
    assert (memory.outside_torch_bytes, memory.headroom_bytes) == (20 << 30, 10 << 30)
    assert display is not None
    assert (display.peak, display.headroom) == ("50.0Gi", "10.0Gi")


# --- limits of time ---


def test_the_time_to_live_deletes_a_finished_job() -> None:
    cluster = running_job(ttlSecondsAfterFinished=60)
    complete(cluster)
    cluster.settled(wait=60)
    cluster.tick(60)
    assert cluster.round().delete_job


def test_an_overdue_job_fails_after_its_step_is_committed() -> None:
    cluster = running_job(activeDeadlineSeconds=3600).settled(wait=3600)
    cluster.tick(3600).settled(failed="DeadlineExceeded", deleting={CONTROLLER})
    cluster.stop().expect(pods=set())
    assert cluster.settle() == Desired()


def test_the_deadline_does_not_count_time_in_the_queue_before_the_start() -> None:
    spec = job_spec(activeDeadlineSeconds=3600, queueName="gpus")
    cluster = SimulatedCluster(spec=spec, facts={"kueue_installed": True})
    cluster.settled()
    for name in cluster.pods:
        cluster.change_pod(name, gated=True)
    cluster.tick(86_400).settled(phase="Pending", start_time=None)
    for name in cluster.pods:
        cluster.change_pod(name, gated=False)
    cluster.run().expect(start_time=cluster.now)
    cluster.tick(3600).settled(phase="Failed", failed="DeadlineExceeded")


# --- a step that takes too long is reported, and the operator does not intervene ---

QUICK, SLOW = {"update": 8.0}, {"rollout": 100.0, "update": 50.0}
TOLD_AFTER = 10.0


def told(step: int, **report: Any) -> SimulatedCluster:
    """`step` steps were committed `TOLD_AFTER` seconds ago, and that is in the status."""
    cluster = running_job()
    cluster.reports(step, update_time=cluster.now, phase="update", **report)
    return cluster.tick(TOLD_AFTER).settled()


@pytest.mark.parametrize(
    ("step", "seconds", "allowed", "message"),
    [
        (5, QUICK, 600, "step 6 (update) is overdue: the trainer has reported nothing since 2026-01-01 00:00:00 UTC"),
        (5, SLOW, 3000, "the previous step took 150 s"),
        (0, None, 1800, "step 1"),
        (60, QUICK, 600, "the final model is overdue"),
    ],
)
def test_an_overdue_step_is_reported_once(step: int, seconds: Any, allowed: float, message: str) -> None:
    cluster = told(step, seconds=seconds)
    cluster.expect(wait=allowed - TOLD_AFTER)
    cluster.tick(allowed - TOLD_AFTER - 1).settled(running="StepsCommitted")
    cluster.tick(1).settled(running="StepOverdue", running_says=message, wait=None)
    cluster.expect(running=True)
    for _ in range(2):
        cluster.tick(700).settled()
    assert cluster.events.count("StepOverdue") == 1
    cluster.expect(pods=ALL_PODS)
    writes = cluster.status_writes
    cluster.reports(min(step + 1, 60), update_time=cluster.now, seconds=QUICK)
    cluster.settled(running="StepsCommitted")
    assert cluster.status_writes == writes + 1


def test_a_report_without_a_time_says_nothing_of_the_step_in_progress() -> None:
    running_job().reports(5).tick(10_000).settled(running="StepsCommitted")


def test_a_step_of_the_attempt_before_is_not_in_progress() -> None:
    cluster = told(5, seconds=QUICK)
    cluster.end(CONTROLLER, ExitCode.ERROR, sentence="an error").next_attempt_runs().expect(number=2)
    cluster.tick(700).settled(running="StepsCommitted")


# --- whose job it is ---


@pytest.mark.parametrize("deleting", [False, True])
def test_a_job_of_another_operator_is_left_alone_at_any_stage(deleting: bool) -> None:
    cluster = running_job().end(CONTROLLER, 1)
    cluster.operator, cluster.deleting = "other/rljob-operator", deleting
    desired = cluster.decide()
    [note] = desired.events
    assert desired == Desired(left_to="other/rljob-operator", events=(note,))
    assert note.reason == "ManagedByAnotherOperator"
    assert "kubectl annotate rljobs --all --all-namespaces rljob.dev/operator-" in note.message


def test_a_finished_job_is_not_claimed() -> None:
    """An upgrade may find thousands, none of which needs a write."""
    cluster = running_job()
    complete(cluster)
    cluster.settled()
    cluster.operator = ""
    assert cluster.decide().claim is None


@pytest.mark.parametrize(("manager", "is_ours"), [("rljob.dev/operator", True), ("kueue.x-k8s.io/multikueue", False)])
def test_a_job_that_names_another_manager_is_left_to_it(manager: str, is_ours: bool) -> None:
    cluster = SimulatedCluster(spec=job_spec(managedBy=manager))
    assert (cluster.decide() != Desired()) == is_ours


# --- objects that running pods need ---


def test_objects_are_looked_up_when_it_is_time() -> None:
    cluster = running_job()
    cluster.facts = {"objects_check_seconds": 120.0}
    waiting = cluster.round()
    assert (waiting.verify, waiting.requeue_after_seconds) == ((), 120.0)
    cluster.facts = {"objects_check_seconds": 0.0}
    due = cluster.round()
    own = {"ConfigMap", "Service", "ServiceAccount", "Role", "RoleBinding", "Secret", "StepReport"}
    assert {manifest["kind"] for manifest in due.verify} - {"NetworkPolicy"} == own
    assert due.requeue_after_seconds is not None
    assert (due.apply, due.create) == ((), ())


def test_nothing_is_looked_up_while_pods_are_missing_or_stop() -> None:
    cluster = SimulatedCluster(facts={"objects_check_seconds": 0.0})
    cluster.round()
    creating = cluster.round()
    assert creating.create
    assert creating.verify == ()
    cluster.facts = {}
    cluster.run()
    cluster.facts = {"objects_check_seconds": 0.0}
    cluster.change_spec(suspend=True)
    assert [cluster.round().verify for _ in range(3)] == [(), (), ()]


@pytest.mark.parametrize("trainer", [{}, {"trainer": {"image": "registry.example/verl:1"}}])
def test_a_changed_spec_does_not_reach_a_running_attempt(trainer: dict[str, Any]) -> None:
    cluster = running_job(**trainer)
    cluster.facts = {"objects_check_seconds": 0.0}
    cluster.raise_steps(90)
    assert cluster.round().apply == ()
