"""A changed plan reaches the same pods, where the nodes know how to restart them; else they are replaced."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.attempt_settings import AttemptSettings
from rljob_api.conditions import ConditionType
from rljob_api.step_report import ExitDecision
from rljob_operator.reconcile.desired import Desired
from rljob_testing.simulated_cluster import (
    CONTROLLER,
    CPU_NODE,
    GPU_NODE,
    PLAN,
    POLICY_0,
    POLICY_1,
    SimulatedCluster,
    job_spec,
)
from tests.unit.operator.reconcile.memory_failures import FACTS, KNOWING, PENDING, evidence, status_of, waiting


def uids(cluster: SimulatedCluster) -> dict[str, str]:
    return {name: pod.uid for name, pod in cluster.pods.items()}


def settings_of(desired: Desired) -> AttemptSettings:
    (config_map,) = (manifest for manifest in desired.apply if manifest["kind"] == "ConfigMap")
    return AttemptSettings.model_validate_json(config_map["data"]["attempt.json"])


def test_the_next_attempt_reuses_the_pods_with_a_new_environment() -> None:
    cluster = waiting()
    before = uids(cluster)
    cluster.round()
    assert (cluster.attempt.reason, cluster.attempt.exit_code) == ("DeviceOutOfMemory", 80)
    assert status_of(cluster).plan_changes[0].level == "RestartInPlace"

    desired = cluster.round()
    settings = settings_of(desired)
    assert (settings.attempt, settings.plan_generation) == (2, 2)
    assert settings.plan_changes == status_of(cluster).plan_changes
    assert (desired.create, desired.delete_pods) == ((), ())
    assert (cluster.attempt.number, cluster.attempt.pods_of_attempt, cluster.attempt.from_step) == (2, 1, 4)
    assert status_of(cluster).attempts[0].end_time == cluster.now
    assert desired.decision is None, "it follows the record of the attempt"

    assert cluster.round().decision == ExitDecision(attempt=1, next_attempt=2, plan_generation=2)
    assert cluster.settle().decision is None
    assert not cluster.holds(ConditionType.RUNNING), "the containers are still the old ones, however ready"
    cluster.restart()
    cluster.settle()
    cluster.ready()
    cluster.reports(3, attempt=2)
    cluster.settle()
    assert uids(cluster) == before
    assert (cluster.phase, cluster.condition(ConditionType.RECOVERING).reason) == ("Running", "Recovered")
    assert (status_of(cluster).adjustments, status_of(cluster).restarts) == (1, 0)


ENGINES_APART: dict[str, Any] = {
    "topology": "Disaggregated",
    "policy": {"replicas": 2, "gpusPerReplica": 1},
    "rollout": {"replicas": 2, "gpusPerReplica": 1},
}


def test_rollout_pods_are_restarted_with_the_others() -> None:
    cluster = waiting(**ENGINES_APART)
    before = uids(cluster)
    assert len(before) == 5
    for _ in range(3):
        cluster.round()
    assert cluster.attempt.number == 2
    cluster.restart()
    cluster.settle()
    cluster.ready()
    cluster.reports(3, attempt=2)
    cluster.settle()
    assert uids(cluster) == before
    assert cluster.phase == "Running"


def test_a_rollout_pod_that_is_lost_meanwhile_ends_the_attempt() -> None:
    cluster = waiting(**ENGINES_APART)
    for _ in range(3):
        cluster.round()
    cluster.vanish("demo-rollout-1")
    cluster.settle()
    assert (cluster.attempt.number, cluster.attempt.reason) == (2, "PodsDisrupted")


def test_an_ignored_pinned_sleep_level_does_not_block_the_restart() -> None:
    """On a CPU, the trainer keeps the engine awake despite the pinned setting; the next attempt has the same plan."""
    awake, on_a_cpu = (
        PLAN.model_copy(update={"rollout_sleep": "Disabled"}),
        FACTS.model_copy(update={"device_total_bytes": 0}),
    )
    policy = {"replicas": 2, "gpusPerReplica": 1}
    cluster = waiting(policy=policy, memory={"rolloutSleep": "Level2"}, plan=awake, profile=on_a_cpu)
    before = uids(cluster)
    cluster.round()
    desired = cluster.round()
    assert (desired.create, desired.delete_pods) == ((), ())
    assert uids(cluster) == before
    plan = status_of(cluster).plan
    assert plan is not None
    assert (plan.generation, plan.rollout_sleep_level) == (2, 0), "the answer to the failure, and nothing else"
    assert cluster.attempt.number == 2


def test_pods_that_were_restarted_in_place_can_be_again() -> None:
    cluster = waiting()
    before = uids(cluster)
    for attempt in (2, 3):
        cluster.settle()
        assert cluster.attempt.number == attempt
        cluster.restart()
        cluster.ready()
        cluster.tick(10)
        words = evidence(cluster, time=cluster.now, attempt=attempt)
        cluster.reports(3, attempt=attempt, memory_profile=FACTS, last_evidence=words)
        cluster.settle()
        assert cluster.phase == "Running"
        cluster.reports(3, attempt=attempt, memory_profile=FACTS, last_evidence=words, pending_exit=PENDING)
    cluster.settle()
    assert (cluster.attempt.number, cluster.attempt.pods_of_attempt) == (4, 1)
    assert set(cluster.attempt.restarts_before.values()) == {2}
    assert uids(cluster) == before


@pytest.mark.parametrize(
    "nodes",
    [(CPU_NODE, GPU_NODE), (), (KNOWING[0], GPU_NODE)],
    ids=["no node knows", "nodes are not watched", "one does not know"],
)
def test_where_not_all_nodes_know_how_the_pods_are_replaced(nodes: Any) -> None:
    cluster = waiting(nodes=nodes)
    cluster.settle()
    assert status_of(cluster).plan_changes[0].level == "ReplacePods"
    assert cluster.pods[CONTROLLER].deleting
    cluster.next_attempt_runs()
    assert (cluster.attempt.number, cluster.attempt.pods_of_attempt, cluster.phase) == (2, None, "Running")


def test_a_remedy_that_changes_the_pods_replaces_them() -> None:
    container = {"name": "rljob", "resources": {"limits": {"memory": "8Gi"}}}
    policy = {"replicas": 2, "template": {"spec": {"containers": [container]}}}
    cluster = SimulatedCluster(spec=job_spec(policy=policy, recovery={"maxHostMemory": "16Gi"}), nodes=KNOWING).run()
    low = {"class": "HostMemory", "confidence": 0.9, "message": "the container's memory ran out"}
    words = evidence(cluster, diagnoses=[low])
    cluster.reports(3, last_evidence=words, pending_exit=PENDING | {"exitCode": 81})
    cluster.settle()
    assert status_of(cluster).plan_changes[0].level == "ReplacePods"
    cluster.next_attempt_runs()
    assert cluster.pods[POLICY_0].memory_limit_bytes == 12 << 30


def test_pods_of_a_template_that_was_changed_meanwhile_are_replaced() -> None:
    cluster = waiting()
    cluster.round()
    cluster.change_spec(policy={"replicas": 2, "template": {"spec": {"nodeSelector": {"pool": "new"}}}})
    cluster.settle()
    assert cluster.attempt.number == 1
    assert cluster.pods[CONTROLLER].deleting


def test_a_setting_pinned_meanwhile_is_in_the_plan_of_replaced_pods() -> None:
    cluster = waiting()
    cluster.round()
    cluster.change_spec(memory={"microBatchTokens": 777})
    cluster.next_attempt_runs()
    plan = status_of(cluster).plan
    assert plan is not None
    assert (plan.generation, plan.micro_batch_tokens, cluster.attempt.pods_of_attempt) == (3, 777, None)


def test_pods_that_restart_too_slowly_are_replaced_uncounted() -> None:
    cluster = waiting()
    cluster.settle()
    cluster.restart(POLICY_0)
    cluster.tick(59)
    assert cluster.settle().requeue_after_seconds == 1
    cluster.tick(1)
    cluster.settle()
    assert (cluster.attempt.number, cluster.attempt.reason) == (2, "NotRestartedInPlace")
    cluster.next_attempt_runs()
    assert (cluster.attempt.number, cluster.phase) == (3, "Running")
    assert (status_of(cluster).adjustments, status_of(cluster).restarts) == (1, 0)


def test_a_pod_that_ends_instead_of_restarting_is_not_a_new_failure() -> None:
    cluster = waiting()
    cluster.settle()
    cluster.end(CONTROLLER, 80, sentence="policy-1 ran out", step=3)
    cluster.settle()
    assert cluster.attempt.reason == "NotRestartedInPlace"
    cluster.next_attempt_runs()
    assert (cluster.attempt.number, status_of(cluster).adjustments) == (3, 1)


def test_a_pod_that_is_gone_ends_an_attempt_in_place() -> None:
    cluster = waiting()
    cluster.settle()
    cluster.restart()
    cluster.vanish(POLICY_1)
    cluster.settle()
    assert cluster.attempt.reason == "PodsDisrupted"
    cluster.next_attempt_runs()
    assert (cluster.attempt.number, cluster.phase) == (3, "Running")


def test_a_suspended_job_does_not_go_on_in_its_pods() -> None:
    cluster = waiting()
    cluster.round()
    cluster.change_spec(suspend=True)
    cluster.settle()
    assert cluster.pods[CONTROLLER].deleting


def test_a_waiting_controller_gets_time_to_end_with_its_logs() -> None:
    cluster = waiting(recovery={"maxAdjustments": 0})
    cluster.settle()
    assert cluster.phase == "Failed"
    assert not any(pod.deleting for pod in cluster.pods.values())
    cluster.end(CONTROLLER, 80, sentence="policy-1 ran out", step=3)
    cluster.settle()
    cluster.finish_deletions()
    assert set(cluster.pods) == {CONTROLLER}


def test_a_controller_that_does_not_end_by_itself_is_ended() -> None:
    cluster = waiting(recovery={"maxAdjustments": 0})
    assert cluster.settle().requeue_after_seconds == 30
    cluster.tick(30)
    cluster.settle()
    assert cluster.pods[CONTROLLER].deleting


def lost_a_worker(step: int = 3) -> SimulatedCluster:
    """A job whose controller lost a process in a worker's pod, and waits."""
    cluster = SimulatedCluster(nodes=KNOWING).run()
    cluster.tick(10)
    pending = {"exitCode": 83, "message": "policy-1 died"}
    cluster.reports(step, pending_exit=pending, update_time=cluster.now)
    return cluster


def test_a_lost_process_is_started_anew_in_place_under_the_same_plan() -> None:
    cluster = lost_a_worker()
    before = uids(cluster)
    assert cluster.settle().requeue_after_seconds == 5, "the end of a pod may say why"
    cluster.tick(5)
    cluster.settle()
    assert (cluster.attempt.number, cluster.attempt.pods_of_attempt, cluster.attempt.plan_generation) == (2, 1, 1)
    assert status_of(cluster).attempts[0].reason == "WorkerLost"
    assert (status_of(cluster).restarts, uids(cluster)) == (1, before)


def test_a_worker_killed_for_its_memory_is_not_taken_for_a_lost_process() -> None:
    cluster = lost_a_worker()
    cluster.tick(3)
    cluster.end(POLICY_1, 137, reason="OOMKilled")
    cluster.settle()
    assert cluster.attempt.reason == "HostOutOfMemory"


def test_processes_that_die_without_a_step_are_waited_after_in_new_pods() -> None:
    cluster = lost_a_worker(step=0)
    cluster.tick(5)
    cluster.settle()
    assert (cluster.attempt.number, cluster.pods[CONTROLLER].deleting) == (1, True)


def test_the_controller_of_a_failed_job_is_told_to_exit() -> None:
    cluster = waiting(memory={"mode": "Disabled"}, recovery={"maxRestarts": 0})
    cluster.settle()
    assert cluster.holds(ConditionType.FAILED)
    assert cluster.report is not None
    assert cluster.report.decision == ExitDecision(attempt=1)


def test_a_controller_whose_pod_is_replaced_gets_no_decision() -> None:
    cluster = waiting(nodes=(GPU_NODE, CPU_NODE))
    for _ in range(4):
        assert cluster.round().decision is None
    assert cluster.attempt.reason == "DeviceOutOfMemory"
