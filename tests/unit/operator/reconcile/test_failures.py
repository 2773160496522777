"""Ends of attempts and the response: counted and uncounted restarts, giving up."""

from __future__ import annotations

from datetime import timedelta

import pytest

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_api.exit_codes import ExitCode
from rljob_api.status import Role
from rljob_api.step_report import Evidence
from rljob_operator.reconcile.desired import Desired
from rljob_testing.simulated_cluster import CONTROLLER, POLICY_0, POLICY_1, SimulatedCluster, job_spec


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (ExitCode.ERROR, "Error"),
        (ExitCode.OUTPUT_UNAVAILABLE, "OutputUnavailable"),
        (137, "Error"),
        (42, "Error"),
    ],
)
def test_a_failure_that_may_pass_is_a_counted_restart(code: int, reason: str) -> None:
    cluster = SimulatedCluster().run()
    cluster.end(CONTROLLER, code, sentence="what happened, and what to do", step=3)
    cluster.round()
    assert cluster.status is not None
    assert (cluster.attempt.reason, cluster.attempt.exit_code, cluster.attempt.to_step) == (reason, code, 3)
    assert cluster.attempt.message == "what happened, and what to do"
    assert cluster.status.restarts == 1
    assert cluster.phase == "Recovering"
    assert cluster.condition(ConditionType.RECOVERING).message == "what happened, and what to do (restart 1 of 3)"
    cluster.next_attempt_runs()
    assert (cluster.attempt.number, cluster.attempt.from_step) == (2, 4)
    assert cluster.phase == "Running"
    assert cluster.condition(ConditionType.RECOVERING).reason == "Recovered"


@pytest.mark.parametrize(
    ("code", "reason"), [(ExitCode.BAD_INPUT, "BadInput"), (ExitCode.INVALID_MANIFEST, "TrainerError")]
)
def test_bad_input_fails_the_job_with_the_trainers_message(code: ExitCode, reason: str) -> None:
    cluster = SimulatedCluster().run()
    cluster.end(CONTROLLER, code, sentence="the task has no reward: write spec.task.reward")
    cluster.settle()
    failed = cluster.condition(ConditionType.FAILED)
    assert failed.reason == reason
    assert failed.message.startswith("the task has no reward: write spec.task.reward. The job resumes after")
    assert cluster.phase == "Failed"
    cluster.finish_deletions()
    assert set(cluster.pods) == {CONTROLLER}, "its logs are kept"
    assert cluster.settle() == Desired()


def test_without_a_termination_message_the_exit_code_is_explained() -> None:
    cluster = SimulatedCluster().run()
    cluster.end(CONTROLLER, ExitCode.WORKER_LOST)
    cluster.tick(20)
    cluster.round()
    assert cluster.attempt.message == (
        "pod demo-controller exited with code 83 (a policy rank or a rollout engine died or hung, or Ray did not "
        "start); kubectl logs demo-controller has more"
    )


def test_exhausted_restarts_fail_the_job_with_an_account() -> None:
    cluster = SimulatedCluster(spec=job_spec(recovery={"maxRestarts": 2})).run()
    for _ in range(2):
        cluster.end(CONTROLLER, 1, sentence="it broke", step=0)
        cluster.next_attempt_runs()
    cluster.end(CONTROLLER, 83, sentence="rank 1 died", step=0)
    cluster.tick(20)
    cluster.settle()
    failed = cluster.condition(ConditionType.FAILED)
    assert failed.reason == "RestartsExhausted"
    assert failed.message.startswith(
        "attempt 3 failed: rank 1 died (all restarts are used, recovery.maxRestarts is 2; "
        "earlier attempts: 1: Error, 2: Error)"
    )
    assert cluster.condition(ConditionType.RECOVERING).reason == "GivenUp"


def test_progress_gives_restarts_back() -> None:
    cluster = SimulatedCluster(spec=job_spec(recovery={"maxRestarts": 1}, steps=1000)).run()
    for failures in range(1, 6):
        cluster.end(CONTROLLER, 1, sentence="it broke", step=10 * failures)
        cluster.next_attempt_runs()
        assert cluster.status is not None
        assert cluster.status.restarts == 1
    cluster.end(CONTROLLER, 1, sentence="it broke", step=cluster.attempt.from_step + 8)
    cluster.settle()
    assert cluster.condition(ConditionType.FAILED).reason == "RestartsExhausted"


def test_half_of_the_remaining_steps_give_a_restart_back() -> None:
    cluster = SimulatedCluster(spec=job_spec(recovery={"maxRestarts": 1}, steps=8)).run()
    cluster.end(CONTROLLER, 1, sentence="it broke", step=4)
    cluster.next_attempt_runs()
    cluster.end(CONTROLLER, 1, sentence="it broke", step=6)
    cluster.settle()
    assert cluster.phase == "Recovering"


def test_restarts_without_progress_back_off_to_five_minutes() -> None:
    cluster = SimulatedCluster(spec=job_spec(recovery={"maxRestarts": 20})).run()
    waits = []
    for _ in range(7):
        cluster.end(CONTROLLER, 1, sentence="it broke", step=0)
        for _ in range(3):
            cluster.settle()
            cluster.finish_deletions()
        wait = cluster.settle().requeue_after_seconds
        waits.append(wait)
        assert cluster.condition(ConditionType.SCHEDULED).reason == "WaitingToRestart"
        cluster.tick(wait or 0)
        cluster.run()
    assert waits == [10, 20, 40, 80, 160, 300, 300]


def test_a_restart_after_progress_does_not_wait() -> None:
    cluster = SimulatedCluster().run()
    cluster.end(CONTROLLER, 1, sentence="it broke", step=1)
    for _ in range(3):
        cluster.settle()
        cluster.finish_deletions()
    cluster.settle()
    assert cluster.attempt.number == 2
    assert set(cluster.pods) == {CONTROLLER, POLICY_0, POLICY_1}


def test_the_next_attempt_waits_until_the_old_pods_are_really_gone() -> None:
    cluster = SimulatedCluster().run()
    cluster.end(CONTROLLER, 1, sentence="it broke", step=5)
    cluster.settle()
    assert set(cluster.pods) == {POLICY_0, POLICY_1}
    assert all(pod.deleting for pod in cluster.pods.values())
    cluster.tick(3600)
    cluster.settle()
    assert cluster.attempt.number == 1
    del cluster.pods[POLICY_0]
    cluster.settle()
    assert cluster.attempt.number == 1
    del cluster.pods[POLICY_1]
    cluster.settle()
    assert cluster.attempt.number == 2


def test_a_worker_killed_for_host_memory_is_named_with_its_limit() -> None:
    template = {"spec": {"containers": [{"name": "rljob", "resources": {"limits": {"memory": "8Gi"}}}]}}
    cluster = SimulatedCluster(spec=job_spec(policy={"replicas": 2, "template": template})).run()
    cluster.end(POLICY_1, 137, reason="OOMKilled")
    cluster.end(CONTROLLER, ExitCode.WORKER_LOST, sentence="policy-1 is gone")
    cluster.round()
    assert cluster.attempt.reason == "HostOutOfMemory"
    assert cluster.attempt.message == (
        "pod demo-policy-1 (policy) was OOMKilled: it ran out of host memory; its limit is 8Gi: "
        "raise resources.limits.memory of container rljob in spec.policy.template, or recovery.maxHostMemory"
    )
    assert cluster.status is not None
    assert cluster.status.restarts == 1


def test_a_controller_killed_without_a_limit_gets_advice() -> None:
    cluster = SimulatedCluster(spec=job_spec(controller={"template": {"spec": {"nodeSelector": {"a": "b"}}}})).run()
    cluster.end(CONTROLLER, 137, reason="OOMKilled")
    cluster.round()
    assert cluster.attempt.message == (
        "pod demo-controller (controller) was OOMKilled: it ran out of host memory; it has no memory limit, so its "
        "node ran out of memory: set resources.limits.memory of container rljob in spec.controller.template"
    )


@pytest.mark.parametrize(
    ("role", "pod", "template"),
    [("rollout", POLICY_1, "policy"), ("policy", POLICY_1, "policy"), ("controller", CONTROLLER, "controller")],
)
def test_advice_names_the_template_of_the_failed_process(role: Role, pod: str, template: str) -> None:
    cluster = SimulatedCluster().run()
    evidence = Evidence(time=cluster.now, attempt=1, role=role, rank=1, step=4, message="low on memory")
    cluster.end(CONTROLLER, ExitCode.HOST_OUT_OF_MEMORY, sentence="low on memory.", step=3, evidence=evidence)
    cluster.round()
    assert cluster.attempt.reason == "HostOutOfMemory"
    assert cluster.attempt.message == (
        f"low on memory; in pod {pod}, it has no memory limit, so its node ran out of memory: "
        f"set resources.limits.memory of container rljob in spec.{template}.template"
    )


def test_a_worker_that_fails_leaves_the_controller_time_to_say_why() -> None:
    cluster = SimulatedCluster().run()
    cluster.tick(60)
    cluster.end(POLICY_0, 1)
    assert cluster.settle().requeue_after_seconds == 20
    cluster.tick(3)
    cluster.end(CONTROLLER, ExitCode.DEVICE_OUT_OF_MEMORY, sentence="policy-0 ran out of GPU memory", step=4)
    cluster.round()
    assert cluster.attempt.reason == "DeviceOutOfMemory"


def test_a_controller_that_lost_a_worker_leaves_it_time_to_say_why() -> None:
    cluster = SimulatedCluster().run()
    cluster.tick(60)
    cluster.end(CONTROLLER, ExitCode.WORKER_LOST, sentence="policy-0 died while updating", step=4)
    assert cluster.settle().requeue_after_seconds == 20
    cluster.tick(3)
    cluster.end(POLICY_1, ExitCode.WORKER_LOST)
    cluster.settle()
    assert cluster.attempt.reason is None, "one that only followed is not the cause"
    cluster.end(POLICY_0, 137, reason="OOMKilled")
    cluster.round()
    assert cluster.attempt.reason == "HostOutOfMemory"


def test_a_kill_that_a_lost_worker_reports_is_diagnosed() -> None:
    cluster = SimulatedCluster().run()
    cluster.end(CONTROLLER, ExitCode.WORKER_LOST, sentence="policy-0 died while updating", step=4)
    cluster.settle()
    cluster.tick(3)
    cluster.end(POLICY_0, ExitCode.HOST_OUT_OF_MEMORY, sentence="the kernel killed 1 of this container's processes")
    cluster.round()
    assert cluster.attempt.reason == "HostOutOfMemory"
    assert cluster.attempt.diagnosis is not None
    assert cluster.attempt.diagnosis.class_name == "HostMemory"


def test_running_workers_delay_the_controllers_end_only_briefly() -> None:
    cluster = SimulatedCluster().run()
    cluster.end(CONTROLLER, ExitCode.WORKER_LOST, sentence="policy-0 died while updating", step=4)
    cluster.settle()
    cluster.tick(20)
    cluster.round()
    assert (cluster.attempt.reason, cluster.attempt.message) == ("WorkerLost", "policy-0 died while updating")
    assert cluster.status is not None
    assert cluster.status.restarts == 1


def test_a_silent_controller_delays_a_dead_workers_end_only_briefly() -> None:
    cluster = SimulatedCluster().run()
    cluster.end(POLICY_0, 1, text="Traceback: boom")
    cluster.settle()
    cluster.tick(20)
    cluster.round()
    assert cluster.attempt.message is not None
    assert "demo-policy-0 exited with code 1" in cluster.attempt.message
    assert "boom" in cluster.attempt.message
    cluster.round()
    assert [pod.name for pod in cluster.pods.values() if pod.deleting] == [CONTROLLER]


@pytest.mark.parametrize(
    "disruption", ["PreemptionByScheduler", "EvictionByEvictionAPI", "DeletionByTaintManager", "Evicted", "NodeLost"]
)
def test_a_pod_that_the_cluster_takes_away_is_nobodys_fault(disruption: str) -> None:
    cluster = SimulatedCluster(spec=job_spec(recovery={"maxRestarts": 0})).run()
    cluster.change_pod(POLICY_0, disruption=disruption, phase="Failed")
    cluster.settle()
    assert cluster.status is not None
    assert cluster.status.restarts == 0
    recovering = cluster.condition(ConditionType.RECOVERING)
    assert (recovering.status, recovering.reason) == ("True", "PodsDisrupted")
    assert disruption in recovering.message
    cluster.next_attempt_runs()
    assert (cluster.phase, cluster.attempt.number) == ("Running", 2)


def test_a_drained_worker_ends_the_controller_first() -> None:
    cluster = SimulatedCluster().run()
    cluster.delete_pod(POLICY_0)
    cluster.settle()
    assert {pod.name for pod in cluster.pods.values() if pod.deleting} == {POLICY_0, CONTROLLER}
    assert not cluster.pods[POLICY_1].deleting
    cluster.reports(7)
    cluster.end(CONTROLLER, ExitCode.TERMINATED, sentence="stopped by SIGTERM", step=7)
    cluster.settle()
    assert cluster.pods[POLICY_1].deleting
    cluster.next_attempt_runs()
    assert cluster.status is not None
    assert (cluster.status.attempts[0].to_step, cluster.status.attempts[0].exit_code) == (7, 143)
    assert cluster.attempt.from_step == 8
    assert cluster.status.restarts == 0


def test_a_pod_that_is_gone_after_all_were_placed_ends_the_attempt() -> None:
    cluster = SimulatedCluster().run()
    cluster.vanish(POLICY_1)
    cluster.settle()
    assert cluster.attempt.reason == "PodsDisrupted"
    assert cluster.attempt.message == "pod demo-policy-1 is gone"


def test_a_pod_that_is_gone_before_all_were_placed_is_made_again() -> None:
    cluster = SimulatedCluster()
    cluster.settle()
    cluster.vanish(POLICY_1)
    cluster.settle()
    assert set(cluster.pods) == {CONTROLLER, POLICY_0, POLICY_1}
    assert cluster.attempt.number == 1


def test_a_pod_that_the_kubelet_rejected_is_nobodys_fault() -> None:
    cluster = SimulatedCluster().run()
    cluster.change_pod(POLICY_0, phase="Failed", end=None)
    cluster.round()
    assert cluster.attempt.reason == "PodsDisrupted"


def test_out_of_memory_is_never_taken_for_a_disruption() -> None:
    cluster = SimulatedCluster().run()
    cluster.delete_pod(POLICY_0)
    cluster.end(CONTROLLER, ExitCode.DEVICE_OUT_OF_MEMORY, sentence="policy-1 ran out of GPU memory")
    cluster.round()
    assert cluster.attempt.reason == "DeviceOutOfMemory"
    assert cluster.status is not None
    assert cluster.status.restarts == 1


def test_only_the_latest_attempts_are_kept() -> None:
    cluster = SimulatedCluster(spec=job_spec(steps=1000)).run()
    for failures in range(25):
        cluster.end(CONTROLLER, 1, sentence="it broke", step=20 * (failures + 1))
        cluster.next_attempt_runs()
    assert cluster.status is not None
    assert [attempt.number for attempt in cluster.status.attempts] == list(range(7, 27))


def test_the_time_of_a_condition_changes_only_with_its_status() -> None:
    cluster = SimulatedCluster().run()
    running_since = cluster.condition(ConditionType.RUNNING).last_transition_time
    cluster.tick(100)
    cluster.facts = {"step_report_problem": "step: not a number"}
    cluster.settle()
    running = cluster.condition(ConditionType.RUNNING)
    assert (running.reason, running.last_transition_time) == (ConditionReason.STEP_REPORT_IGNORED, running_since)
    cluster.end(CONTROLLER, 1)
    cluster.round()
    assert cluster.condition(ConditionType.RUNNING).last_transition_time == running_since + timedelta(seconds=100)
