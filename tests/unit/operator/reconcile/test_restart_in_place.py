"""A changed plan reaches the same pods, where the nodes know how to restart them; else they are replaced."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.attempt_settings import AttemptSettings
from rljob_api.step_report import ExitDecision
from rljob_operator.reconcile.desired import Desired
from rljob_operator.reconcile.pods import MAX_RESTARTS_IN_PLACE
from rljob_testing.simulated_cluster import (
    CONTROLLER,
    CPU_NODE,
    GPU_NODE,
    PLAN,
    POLICY_0,
    POLICY_1,
    SimulatedCluster,
    running_job,
)
from tests.unit.operator.reconcile.memory_failures import FACTS, KNOWING, PENDING, evidence, waiting

ENGINES_APART: dict[str, Any] = {
    "topology": "Disaggregated",
    "policy": {"replicas": 2, "gpusPerReplica": 1},
    "rollout": {"replicas": 2, "gpusPerReplica": 1},
}


def uids(cluster: SimulatedCluster) -> dict[str, str]:
    return {name: pod.uid for name, pod in cluster.pods.items()}


def settings_of(desired: Desired) -> AttemptSettings:
    (config_map,) = (manifest for manifest in desired.apply if manifest["kind"] == "ConfigMap")
    return AttemptSettings.model_validate_json(config_map["data"]["attempt.json"])


@pytest.mark.parametrize(("spec", "pods"), [({}, 3), (ENGINES_APART, 5)])
def test_the_next_attempt_reuses_the_pods_with_a_new_environment(spec: dict[str, Any], pods: int) -> None:
    cluster = waiting(**spec)
    before = uids(cluster)
    cluster.round()
    cluster.expect(reason="DeviceOutOfMemory", exit_code=80)
    assert cluster.stored.plan_changes[0].level == "RestartInPlace"

    desired = cluster.round()
    settings = settings_of(desired)
    assert (settings.attempt, settings.plan_generation) == (2, 2)
    assert settings.plan_changes == cluster.stored.plan_changes
    assert (desired.create, desired.delete_pods) == ((), ())
    cluster.expect(number=2, pods_of_attempt=1, from_step=4)
    assert cluster.stored.attempts[0].end_time == cluster.now
    assert desired.decision is None, "it follows the record of the attempt"

    assert cluster.round().decision == ExitDecision(attempt=1, next_attempt=2, plan_generation=2)
    assert cluster.settle().decision is None
    cluster.expect(running=False)  # the containers are still the old ones, however ready
    cluster.restart().settled().ready()
    cluster.reports(3, attempt=2).settled(phase="Running", recovering="Recovered", adjustments=1, restarts=0)
    assert uids(cluster) == before
    assert len(before) == pods


def test_an_ignored_pinned_sleep_level_does_not_block_the_restart() -> None:
    """The trainer on a CPU keeps the engine awake despite the pinned setting; the next attempt has the same plan."""
    awake = PLAN.model_copy(update={"rollout_sleep": "Disabled"})
    on_a_cpu = FACTS.model_copy(update={"device_memory_bytes": 0})
    policy = {"replicas": 2, "gpusPerReplica": 1}
    cluster = waiting(policy=policy, memory={"rolloutSleep": "Level2"}, plan=awake, facts=on_a_cpu)
    before = uids(cluster)
    cluster.settled(number=2, pods_of_attempt=1)
    assert uids(cluster) == before
    plan = cluster.plan
    assert (plan.generation, plan.rollout_sleep_level) == (2, 0), "the answer to the failure, and nothing else"


def test_the_record_of_the_attempt_has_the_plan_that_its_config_map_has() -> None:
    """The pods wait for a file with that generation; a plan that is reported in the same reconcile is not in it."""
    cluster = waiting()
    cluster.round()
    newer = PLAN.model_copy(update={"generation": 7})
    settings = settings_of(cluster.reports(3, plan=newer, memory_facts=FACTS, pending_exit=PENDING).round())
    cluster.expect(number=2, pods_of_attempt=1, plan_generation=settings.plan_generation, plan=newer)


def test_pods_that_were_restarted_in_place_can_be_again() -> None:
    cluster = waiting()
    before = uids(cluster)
    for attempt in (2, 3):
        cluster.settled(number=attempt).restart().ready().tick(10)
        found = evidence(cluster, attempt=attempt)
        cluster.reports(3, memory_facts=FACTS, last_evidence=found).settled(phase="Running")
        cluster.reports(3, memory_facts=FACTS, last_evidence=found, pending_exit=PENDING)
        assert cluster.round().decision is None
    cluster.settled(number=4, pods_of_attempt=1, restarts_before=dict.fromkeys(before, 2))
    assert uids(cluster) == before


# --- the pods are replaced ---


@pytest.mark.parametrize(
    "nodes",
    [(CPU_NODE, GPU_NODE), (), (KNOWING[0], GPU_NODE)],
    ids=["no node knows", "nodes are not watched", "one does not know"],
)
def test_where_not_all_nodes_know_how_the_pods_are_replaced(nodes: Any) -> None:
    cluster = waiting(nodes=nodes)
    for _ in range(4):
        assert cluster.round().decision is None
    cluster.settled(reason="DeviceOutOfMemory")
    assert cluster.stored.plan_changes[0].level == "ReplacePods"
    assert cluster.pods[CONTROLLER].deleting
    cluster.next_attempt_runs().expect(number=2, pods_of_attempt=None, phase="Running")


@pytest.mark.parametrize(
    "prevent", [lambda job: job.observes(refused="exceeded quota"), lambda job: job.vanish(POLICY_1)]
)
def test_pods_that_could_not_restart_when_the_plan_changed_are_replaced(prevent: Any) -> None:
    cluster = prevent(waiting())
    cluster.round()
    assert cluster.stored.plan_changes[0].level == "ReplacePods"
    assert cluster.observes().settled(number=1).pods[CONTROLLER].deleting


def test_a_remedy_that_changes_the_pods_replaces_them() -> None:
    container = {"name": "rljob", "resources": {"limits": {"memory": "8Gi"}}}
    policy = {"replicas": 2, "template": {"spec": {"containers": [container]}}}
    cluster = running_job(policy=policy, recovery={"maxHostMemory": "16Gi"}, nodes=KNOWING)
    low = {"class": "HostMemory", "confidence": 0.9, "message": "the container's memory ran out"}
    found = evidence(cluster, diagnoses=[low])
    cluster.reports(3, last_evidence=found, pending_exit=PENDING | {"exitCode": 81}).settle()
    assert cluster.stored.plan_changes[0].level == "ReplacePods"
    assert cluster.next_attempt_runs().pods[POLICY_0].memory_limit_bytes == 12 << 30


@pytest.mark.parametrize(
    "edit",
    [{"suspend": True}, {"policy": {"replicas": 2, "template": {"spec": {"nodeSelector": {"pool": "new"}}}}}],
)
def test_pods_are_not_reused_after_an_edit_that_they_do_not_fit(edit: dict[str, Any]) -> None:
    cluster = waiting()
    cluster.round()
    assert cluster.change_spec(**edit).settled(number=1).pods[CONTROLLER].deleting


def test_a_setting_pinned_meanwhile_is_in_the_plan_of_replaced_pods() -> None:
    cluster = waiting()
    cluster.round()
    cluster.change_spec(memory={"microBatchTokens": 777}).next_attempt_runs().expect(pods_of_attempt=None)
    plan = cluster.plan
    assert (plan.generation, plan.micro_batch_tokens) == (3, 777)


@pytest.mark.parametrize(
    ("event", "spec", "reason"),
    [
        (lambda job: job.restart(POLICY_0).tick(59).settled(wait=1).tick(1), {}, "NotRestartedInPlace"),
        (lambda job: job.end(CONTROLLER, 80, message="it ran out", step=3), {}, "NotRestartedInPlace"),
        (lambda job: job.restart().vanish(POLICY_1), {}, "PodsDisrupted"),
        (lambda job: job.vanish("demo-rollout-1"), ENGINES_APART, "PodsDisrupted"),
    ],
    ids=["too slowly", "it ends", "it is gone", "it is gone before"],
)
def test_a_pod_that_does_not_restart_is_replaced_uncounted(event: Any, spec: dict[str, Any], reason: str) -> None:
    cluster = event(waiting(**spec).settled()).settled(number=2, reason=reason)
    cluster.next_attempt_runs().expect(number=3, phase="Running", adjustments=1, restarts=0)


# --- a controller that waits for a decision ---


def test_a_controller_gets_time_to_exit_with_its_logs_after_a_failed_job() -> None:
    cluster = waiting(recovery={"maxAdjustments": 0}).settled(phase="Failed", deleting=set(), wait=30)
    cluster.end(CONTROLLER, 80, message="policy-1 ran out", step=3).settled().finish_deletions()
    cluster.expect(pods={CONTROLLER})


def test_a_controller_that_does_not_exit_by_itself_is_ended() -> None:
    cluster = waiting(memory={"mode": "Disabled"}, recovery={"maxRestarts": 0}).settled(failed=True, wait=30)
    assert cluster.report is not None
    assert cluster.report.decision == ExitDecision(attempt=1), "the controller must exit"
    assert cluster.tick(30).settled().pods[CONTROLLER].deleting


def lost_a_worker(step: int = 3) -> SimulatedCluster:
    """A job whose controller lost a process in a worker's pod, and waits."""
    cluster = running_job(nodes=KNOWING).tick(10)
    return cluster.reports(step, pending_exit={"exitCode": 83, "message": "policy-1 died"}, update_time=cluster.now)


def test_a_lost_process_is_started_anew_in_place_under_the_same_plan() -> None:
    cluster = lost_a_worker()
    before = uids(cluster)
    cluster.settled(wait=5)  # the end of a pod may explain it
    cluster.tick(5).settled(number=2, pods_of_attempt=1, plan_generation=1, restarts=1)
    assert cluster.stored.attempts[0].reason == "WorkerLost"
    assert uids(cluster) == before


def test_a_worker_killed_for_its_memory_is_not_taken_for_a_lost_process() -> None:
    lost_a_worker().tick(3).end(POLICY_1, 137, reason="OOMKilled").settled(reason="HostOutOfMemory")


def test_processes_that_die_without_a_step_get_new_pods() -> None:
    assert lost_a_worker(step=0).tick(5).settled(number=1).pods[CONTROLLER].deleting


# --- pods that restart in place again and again, though nobody asked for it ---


def restart(cluster: SimulatedCluster, times: int) -> SimulatedCluster:
    for _ in range(times):
        cluster.restart(POLICY_0)
    return cluster


def test_a_pod_without_its_new_environment_is_replaced_and_counted() -> None:
    cluster = restart(waiting().settled().restart(), MAX_RESTARTS_IN_PLACE - 1)
    cluster.settled(number=2, reason=None)  # its node may be slow
    restart(cluster, 1).settled(reason="RestartLoop", exit_code=86, restarts=1, adjustments=1)
    times = f"{MAX_RESTARTS_IN_PLACE + 1} times in this attempt"
    cluster.expect(recovering_contains=f"pod {POLICY_0} was restarted in place {times}")
    assert cluster.pods[CONTROLLER].deleting
    cluster.next_attempt_runs().expect(number=3, pods_of_attempt=None, phase="Running")


def test_restarts_of_earlier_attempts_are_not_counted() -> None:
    cluster = restart(waiting().settled().restart(), MAX_RESTARTS_IN_PLACE - 1).ready()
    found = evidence(cluster, attempt=2)
    cluster.reports(3, memory_facts=FACTS, last_evidence=found, pending_exit=PENDING)
    cluster.settled(number=3, pods_of_attempt=1).restart().ready().settled(number=3, phase="Running")


def test_an_operator_that_comes_back_after_hours_ends_the_loop_at_once() -> None:
    cluster = restart(running_job(nodes=KNOWING).reports(3), 4000)
    cluster.tick(3 * 3600).settled(reason="RestartLoop")


def test_pods_in_a_restart_loop_exhaust_the_restarts() -> None:
    cluster = running_job(recovery={"maxRestarts": 2}, nodes=KNOWING)
    for _ in range(2):
        restart(cluster, MAX_RESTARTS_IN_PLACE + 1).settled(reason="RestartLoop").next_attempt_runs()
    restart(cluster, MAX_RESTARTS_IN_PLACE + 1).settled(failed="RestartsExhausted")
    cluster.expect(failed_contains="earlier attempts: 1: RestartLoop, 2: RestartLoop).")


@pytest.mark.parametrize("trainer", [{}, {"trainer": {"image": "registry.example/trl:1"}}])
def test_a_lost_status_and_containers_of_other_trainers_are_no_loop(trainer: dict[str, Any]) -> None:
    cluster = restart(running_job(**trainer, nodes=KNOWING), MAX_RESTARTS_IN_PLACE + 1)
    if not trainer:
        cluster.set_status(None)
    cluster.settled(number=1, reason=None)
