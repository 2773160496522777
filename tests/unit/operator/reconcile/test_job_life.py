"""A job from `kubectl apply` to its end, and the few writes that it takes."""

from __future__ import annotations

from rljob_api.conditions import ConditionType
from rljob_operator.reconcile.desired import Desired
from rljob_testing.simulated_cluster import (
    CONTROLLER,
    PLAN,
    POLICY_0,
    POLICY_1,
    SimulatedCluster,
    job_spec,
    rank_memory,
    reasons,
)
from tests.unit.operator.reconcile.memory_failures import FACTS


def test_the_first_round_writes_the_attempt_down_and_makes_nothing() -> None:
    cluster = SimulatedCluster()
    first = cluster.round()
    assert first.finalizer is True
    assert first == Desired(claim=cluster.settings.installation, finalizer=True, status=first.status)
    assert cluster.attempt.number == 1
    assert cluster.status is not None
    assert cluster.status.start_time == cluster.now
    assert cluster.status.observed_generation == 1
    assert cluster.phase == "Pending"


def test_all_conditions_are_there_from_the_first_round_on() -> None:
    cluster = SimulatedCluster()
    cluster.round()
    assert cluster.status is not None
    assert reasons(cluster.status.conditions) == {
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
    assert all(condition.status == "False" for condition in cluster.status.conditions)


def test_the_second_round_creates_support_objects_then_pods() -> None:
    cluster = SimulatedCluster()
    cluster.round()
    second = cluster.round()
    assert second.apply
    assert [manifest["kind"] for manifest in second.create][-3:] == ["Pod"] * 3
    assert set(cluster.pods) == {CONTROLLER, POLICY_0, POLICY_1}
    assert second.status is None
    assert cluster.round() == Desired()


def test_a_job_that_starts_at_once_takes_two_status_writes_until_it_runs() -> None:
    cluster = SimulatedCluster().run()
    assert cluster.phase == "Running"
    assert cluster.holds(ConditionType.SCHEDULED)
    assert cluster.status_writes == 2
    assert cluster.events == []


def test_pods_that_are_placed_and_take_long_to_start_show_as_scheduled() -> None:
    cluster = SimulatedCluster()
    cluster.settle()
    cluster.place()
    assert cluster.settle().requeue_after_seconds == 5
    assert not cluster.holds(ConditionType.SCHEDULED)
    cluster.tick(5)
    cluster.settle()
    assert cluster.holds(ConditionType.SCHEDULED)
    assert not cluster.holds(ConditionType.RUNNING)
    assert cluster.status_writes == 2


def test_exit_code_0_completes_the_job_and_keeps_the_controller() -> None:
    cluster = SimulatedCluster().run()
    cluster.end(CONTROLLER, 0, sentence="all steps are committed", step=60)
    cluster.settle()
    cluster.finish_deletions()
    assert cluster.phase == "Complete"
    assert set(cluster.pods) == {CONTROLLER}
    assert cluster.status is not None
    assert (cluster.status.step, cluster.status.completion_time) == (60, cluster.now)
    assert (cluster.attempt.reason, cluster.attempt.exit_code, cluster.attempt.to_step) == ("AllStepsCommitted", 0, 60)
    assert cluster.events[-1] == "JobCompleted"
    assert cluster.settle() == Desired()


def test_a_worker_that_ends_with_the_controller_is_no_failure() -> None:
    cluster = SimulatedCluster().run()
    cluster.end(POLICY_0, 0)
    assert cluster.settle().requeue_after_seconds is not None
    cluster.end(CONTROLLER, 0, sentence="all steps are committed", step=60)
    cluster.settle()
    assert cluster.phase == "Complete"


def test_steps_raised_on_a_complete_job_take_a_further_attempt() -> None:
    cluster = SimulatedCluster().run()
    cluster.end(CONTROLLER, 0, sentence="all steps are committed", step=60)
    cluster.settle()
    cluster.finish_deletions()
    cluster.raise_steps(90)
    cluster.run()
    assert cluster.phase == "Running"
    assert (cluster.attempt.number, cluster.attempt.from_step) == (2, 61)
    assert cluster.status is not None
    assert (cluster.status.completion_time, cluster.status.restarts) == (None, 0)
    assert cluster.condition(ConditionType.COMPLETE).reason == "StepsRaised"


def test_steps_raised_during_a_run_extend_the_job_afterwards() -> None:
    cluster = SimulatedCluster().run()
    cluster.raise_steps(90)
    cluster.settle()
    assert set(cluster.pods) == {CONTROLLER, POLICY_0, POLICY_1}
    cluster.end(CONTROLLER, 0, sentence="all steps are committed", step=60)
    cluster.settle()
    assert cluster.status is not None
    assert cluster.status.attempts[0].reason == "StepsRaised"
    cluster.next_attempt_runs()
    assert cluster.attempt.from_step == 61
    assert cluster.status.restarts == 0
    assert not cluster.holds(ConditionType.RECOVERING)


def test_a_trainer_that_completes_without_progress_is_given_up() -> None:
    cluster = SimulatedCluster(spec=job_spec(recovery={"maxRestarts": 1})).run()
    cluster.end(CONTROLLER, 0, sentence="done", step=0)
    cluster.next_attempt_runs()
    cluster.end(CONTROLLER, 0, sentence="done", step=0)
    cluster.settle()
    assert cluster.condition(ConditionType.FAILED).reason == "RestartsExhausted"


def test_step_reports_reach_the_status_at_most_once_in_the_interval() -> None:
    cluster = SimulatedCluster().run()
    before = cluster.status_writes
    cluster.tick(10)
    for step in range(1, 21):
        cluster.reports(step)
        cluster.settle()
        cluster.tick(1)
    assert cluster.status_writes - before == 2
    cluster.tick(10)
    cluster.settle()
    assert cluster.status is not None
    assert (cluster.status.step, cluster.status.reward) == (20, 0.5)
    assert cluster.status.display is not None
    assert cluster.status.display.step == "20/60"


def test_a_report_that_waits_is_looked_at_again_when_the_interval_is_over() -> None:
    cluster = SimulatedCluster().run()
    cluster.tick(4)
    cluster.reports(1)
    assert cluster.settle().requeue_after_seconds == 6


def test_the_plan_comes_from_the_step_report() -> None:
    cluster = SimulatedCluster().run()
    cluster.tick(10)
    cluster.reports(1)
    cluster.settle()
    assert cluster.status is not None
    assert cluster.status.plan == PLAN
    cluster.tick(10)
    cluster.reports(2, plan=PLAN.model_copy(update={"generation": 7}))
    cluster.settle()
    assert cluster.status.plan.generation == 7
    cluster.tick(10)
    cluster.reports(3, plan=PLAN.model_copy(update={"generation": 6}))
    cluster.settle()
    assert cluster.status.plan.generation == 7, "an older plan comes late"


def test_a_later_pin_changes_the_plan_of_the_next_attempt() -> None:
    cluster = SimulatedCluster().run()
    cluster.tick(10)
    cluster.reports(1, memory_profile=FACTS)
    cluster.change_spec(memory={"microBatchTokens": 1000, "rolloutSleep": "Level1"})
    cluster.settle()
    assert cluster.status is not None
    assert cluster.status.plan == PLAN
    cluster.end(CONTROLLER, 83, sentence="a worker was lost", step=1)
    cluster.tick(20)
    cluster.next_attempt_runs()
    assert cluster.status.plan == PLAN.model_copy(
        update={"generation": 2, "micro_batch_tokens": 1000, "rollout_sleep": "Level1"}
    )
    assert cluster.attempt.plan_generation == 2


def test_memory_is_that_of_the_fullest_gpu() -> None:
    cluster = SimulatedCluster().run()
    cluster.tick(10)
    fullest = rank_memory(rank=1, device_free_bytes=40 << 30)
    cluster.reports(1, memory=[rank_memory(), fullest, rank_memory(rank=2, device_total_bytes=0)])
    cluster.settle()
    assert cluster.status is not None
    assert cluster.status.memory is not None
    assert cluster.status.memory.outside_torch_bytes == 20 << 30
    assert cluster.status.memory.headroom_bytes == 10 << 30
    assert cluster.status.display is not None
    assert (cluster.status.display.peak, cluster.status.display.headroom) == ("50.0Gi", "10.0Gi")


def test_the_time_to_live_deletes_a_finished_job() -> None:
    cluster = SimulatedCluster(spec=job_spec(ttlSecondsAfterFinished=60)).run()
    cluster.end(CONTROLLER, 0, sentence="done", step=60)
    cluster.settle()
    cluster.finish_deletions()
    assert cluster.settle().requeue_after_seconds == 60
    cluster.tick(60)
    assert cluster.round().delete_job


def test_an_overdue_job_fails_after_its_step_is_committed() -> None:
    cluster = SimulatedCluster(spec=job_spec(activeDeadlineSeconds=3600)).run()
    assert cluster.settle().requeue_after_seconds == 3600
    cluster.tick(3600)
    cluster.settle()
    assert cluster.condition(ConditionType.FAILED).reason == "DeadlineExceeded"
    assert [pod.name for pod in cluster.pods.values() if pod.deleting] == [CONTROLLER]
    cluster.finish_deletions()
    cluster.settle()
    cluster.finish_deletions()
    assert cluster.pods == {}
    assert cluster.settle() == Desired()


def test_the_deadline_does_not_count_time_in_the_queue_before_the_start() -> None:
    spec = job_spec(activeDeadlineSeconds=3600, queueName="gpus")
    cluster = SimulatedCluster(spec=spec, facts={"kueue_installed": True})
    cluster.settle()
    for name in cluster.pods:
        cluster.change_pod(name, gated=True)
    cluster.tick(86_400)
    cluster.settle()
    assert cluster.phase == "Pending"
    assert cluster.status is not None
    assert cluster.status.start_time is None
    for name in cluster.pods:
        cluster.change_pod(name, gated=False)
    cluster.run()
    assert cluster.status.start_time == cluster.now
    cluster.tick(3600)
    cluster.settle()
    assert (cluster.phase, cluster.condition(ConditionType.FAILED).reason) == ("Failed", "DeadlineExceeded")
