"""A rollout pod that is lost while others generate is replaced in the same attempt."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from rljob_api.conditions import ConditionType
from rljob_api.exit_codes import ExitCode
from rljob_operator.reconcile.observed import ContainerTermination
from rljob_operator.reconcile.pod_replacement import MAX_REPLACEMENTS
from rljob_testing.simulated_cluster import (
    CONTROLLER,
    CPU_NODE,
    GPU_NODE,
    POLICY_0,
    OperatorDied,
    SimulatedCluster,
    job_spec,
)

ROLLOUT_0, ROLLOUT_1 = "demo-rollout-0", "demo-rollout-1"


def running(rollouts: int = 2, **facts: Any) -> SimulatedCluster:
    spec = job_spec(topology="Disaggregated", policy={"replicas": 1}, rollout={"replicas": rollouts})
    cluster = SimulatedCluster(spec=spec, facts=facts).run()
    cluster.reports(3)
    cluster.settle()
    return cluster


def bring_up(cluster: SimulatedCluster, name: str) -> None:
    cluster.place(name)
    cluster.start(name)
    cluster.ready(name)
    cluster.settle()


def test_a_vanished_rollout_pod_is_created_again_in_the_same_attempt() -> None:
    cluster = running()
    before = cluster.pods[ROLLOUT_1].uid
    cluster.vanish(ROLLOUT_1)
    cluster.settle()
    assert cluster.pods[ROLLOUT_1].uid != before
    assert (cluster.phase, cluster.attempt.number, cluster.attempt.reason) == ("Running", 1, None)
    assert (cluster.attempt.replacing_pods, cluster.attempt.pod_replacements) == ([ROLLOUT_1], 1)
    assert cluster.events[-1] == "ReplacingPod"
    cluster.tick(20)
    cluster.settle()
    message = cluster.condition(ConditionType.RUNNING).message
    assert message == "steps are being committed without demo-rollout-1, which the operator replaces"
    cluster.tick(20)
    bring_up(cluster, ROLLOUT_1)
    assert (cluster.attempt.replacing_pods, cluster.attempt.pod_replacements) == ([], 1)
    assert cluster.events[-1] == "PodReplaced"
    assert cluster.condition(ConditionType.RUNNING).message == "steps are being committed"
    assert not any(pod.deleting for pod in cluster.pods.values())


def test_the_loss_is_recorded_before_a_pod_is_deleted_or_created() -> None:
    cluster = running()
    cluster.vanish(ROLLOUT_1)
    desired = cluster.round()
    assert desired.create == ()
    assert desired.status is not None
    assert desired.status.attempts[-1].replacing_pods == [ROLLOUT_1]
    assert [pod["metadata"]["name"] for pod in cluster.round().create if pod["kind"] == "Pod"] == [ROLLOUT_1]


@pytest.mark.parametrize(
    "lost",
    [
        {"phase": "Failed", "ready": False, "disruption": "EvictionByEvictionAPI"},
        {"phase": "Failed", "ready": False, "end": ContainerTermination(137, "ContainerStatusUnknown", None, None)},
    ],
)
def test_what_is_left_of_a_lost_pod_is_deleted(lost: dict[str, Any]) -> None:
    cluster = running()
    before = cluster.pods[ROLLOUT_1].uid
    cluster.change_pod(ROLLOUT_1, **lost)
    cluster.settle()
    assert cluster.pods[ROLLOUT_1].uid != before
    assert cluster.attempt.reason is None


def test_a_pod_that_is_being_deleted_is_waited_for() -> None:
    cluster = running()
    cluster.delete_pod(ROLLOUT_1)
    cluster.settle()
    assert cluster.pods[ROLLOUT_1].deleting
    assert [pod.name for pod in cluster.pods.values() if pod.deleting] == [ROLLOUT_1]
    cluster.finish_deletions()
    cluster.settle()
    assert not cluster.pods[ROLLOUT_1].deleting
    assert cluster.attempt.number == 1


def test_a_pod_on_a_lost_node_is_removed_and_replaced() -> None:
    cluster = running()
    cluster.place(ROLLOUT_1, node="lost-node")
    cluster.nodes = (CPU_NODE, GPU_NODE, replace(GPU_NODE, name="lost-node", unreachable_since=cluster.now))
    cluster.delete_pod(ROLLOUT_1)  # as the node controller does
    for _ in range(20):
        cluster.tick(30)
        cluster.settle()
    assert cluster.pods[ROLLOUT_1].node is None
    assert cluster.events.count("PodRemoved") == 1
    assert cluster.attempt.number == 1


def the_controller_gives_up(cluster: SimulatedCluster) -> None:
    cluster.end(CONTROLLER, ExitCode.WORKER_LOST, sentence="rollout-1 died while generating", step=3)


def a_policy_pod_is_lost_too(cluster: SimulatedCluster) -> None:
    cluster.vanish(POLICY_0)


def all_others_are_lost_too(cluster: SimulatedCluster) -> None:
    cluster.vanish(ROLLOUT_0)


def the_spec_has_changed(cluster: SimulatedCluster) -> None:
    cluster.change_spec(rollout={"replicas": 2, "template": {"spec": {"priorityClassName": "high"}}})


def it_was_replaced_too_often(cluster: SimulatedCluster) -> None:
    assert cluster.status is not None
    attempts = [cluster.attempt.model_copy(update={"pod_replacements": MAX_REPLACEMENTS})]
    cluster.set_status(cluster.status.model_copy(update={"attempts": attempts}))


def they_are_a_group_of_kueue(cluster: SimulatedCluster) -> None:
    for name in cluster.pods:
        cluster.change_pod(name, in_group=True)


@pytest.mark.parametrize(
    "also",
    [
        the_controller_gives_up,
        a_policy_pod_is_lost_too,
        all_others_are_lost_too,
        the_spec_has_changed,
        it_was_replaced_too_often,
        they_are_a_group_of_kueue,
    ],
)
def test_otherwise_the_attempt_ends_and_is_not_counted(also: Any) -> None:
    cluster = running()
    also(cluster)
    cluster.vanish(ROLLOUT_1)
    for _ in range(3):
        cluster.tick(10)
        cluster.settle()
    assert cluster.attempt.reason == "PodsDisrupted"
    assert cluster.status is not None
    assert cluster.status.restarts == 0


def test_the_only_rollout_pod_ends_the_attempt() -> None:
    cluster = running(rollouts=1)
    cluster.vanish(ROLLOUT_0)
    cluster.settle()
    assert cluster.attempt.reason == "PodsDisrupted"


@pytest.mark.parametrize("deleting", [False, True])
def test_a_container_that_ran_out_of_memory_is_a_failure(deleting: bool) -> None:
    cluster = running()
    cluster.end(ROLLOUT_1, 137, reason="OOMKilled")
    cluster.change_pod(ROLLOUT_1, deleting=deleting)
    cluster.settle()
    assert cluster.attempt.reason == "HostOutOfMemory"


def test_a_pod_that_filled_its_volume_is_a_failure() -> None:
    cluster = running()
    cluster.change_pod(ROLLOUT_1, phase="Failed", ready=False, evicted="Usage of EmptyDir volume exceeds the limit")
    cluster.settle()
    assert cluster.attempt.reason == "Evicted"


def test_a_second_pod_is_replaced_while_the_first_still_terminates() -> None:
    cluster = running(rollouts=3)
    cluster.delete_pod(ROLLOUT_1)
    cluster.settle()
    before = cluster.pods["demo-rollout-2"].uid
    cluster.vanish("demo-rollout-2")
    cluster.settle()
    assert cluster.pods[ROLLOUT_1].deleting
    assert cluster.pods["demo-rollout-2"].uid != before
    assert cluster.attempt.pod_replacements == 2


def test_a_replaced_pod_without_a_node_does_not_release_the_others() -> None:
    cluster = running()
    cluster.vanish(ROLLOUT_1)
    cluster.settle()
    cluster.tick(1200)
    cluster.settle()
    assert cluster.attempt.number == 1
    assert not any(pod.deleting for pod in cluster.pods.values())


@pytest.mark.parametrize("writes", range(6))
def test_an_operator_that_is_killed_at_any_write_replaces_it_once(writes: int) -> None:
    cluster = running()
    cluster.vanish(ROLLOUT_1)
    for _ in range(3):
        with suppress(OperatorDied):
            cluster.round(dies_after_writes=writes)
    cluster.settle()
    assert cluster.attempt.pod_replacements == 1
    bring_up(cluster, ROLLOUT_1)
    assert cluster.attempt.replacing_pods == []


def test_as_many_pods_are_replaced_as_the_limit_allows() -> None:
    cluster = running()
    for _ in range(MAX_REPLACEMENTS):
        cluster.vanish(ROLLOUT_1)
        cluster.settle()
        bring_up(cluster, ROLLOUT_1)
        cluster.tick(60)
    assert (cluster.attempt.reason, cluster.attempt.pod_replacements) == (None, MAX_REPLACEMENTS)
    cluster.vanish(ROLLOUT_1)
    cluster.settle()
    assert cluster.attempt.reason == "PodsDisrupted"
    assert cluster.events.count("ReplacingPod") == MAX_REPLACEMENTS


def test_a_node_that_refuses_each_new_pod_causes_no_busy_loop() -> None:
    cluster = running()
    cluster.vanish(ROLLOUT_1)
    cluster.settle()
    pods = set()
    for _ in range(120):
        if cluster.pods[ROLLOUT_1].node is None:
            cluster.place(ROLLOUT_1)
            cluster.change_pod(ROLLOUT_1, phase="Failed", disruption="UnexpectedAdmissionError")
        pods.add(cluster.pods[ROLLOUT_1].uid)
        cluster.settle()
        cluster.tick(min(1.0, cluster.last.requeue_after_seconds or 1.0))
    assert 4 <= len(pods) <= 5
    assert cluster.attempt.reason is None
    message = cluster.condition(ConditionType.RUNNING).message
    assert message.endswith("pod demo-rollout-1 was taken from node gpu-node (UnexpectedAdmissionError)")


def test_a_new_pod_that_neither_starts_nor_ends_causes_no_busy_loop() -> None:
    cluster = running()
    cluster.vanish(ROLLOUT_1)
    cluster.settle()
    cluster.place(ROLLOUT_1)
    cluster.tick(60)
    cluster.delete_pod(ROLLOUT_1)
    for _ in range(4):
        cluster.tick(900)
        assert cluster.settle().requeue_after_seconds == 60
    assert cluster.attempt.reason is None


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"unschedulable": "2 Insufficient nvidia.com/gpu"}, "pod demo-rollout-1: 2 Insufficient nvidia.com/gpu"),
        ({"node": "gpu-node", "waiting": "ErrImagePull: x"}, "pod demo-rollout-1 cannot start: ErrImagePull: x"),
    ],
)
def test_running_names_the_reason_why_a_new_pod_does_not_come(facts: dict[str, Any], why: str) -> None:
    cluster = running()
    cluster.vanish(ROLLOUT_1)
    cluster.settle()
    cluster.change_pod(ROLLOUT_1, **facts)
    cluster.tick(20)
    cluster.settle()
    assert cluster.condition(ConditionType.RUNNING).message == (
        f"steps are being committed without demo-rollout-1, which the operator replaces: {why}"
    )


def test_an_owned_copy_of_a_rollout_pod_stops_no_reconcile() -> None:
    cluster = running()
    cluster.pods["copy"] = replace(cluster.pods[ROLLOUT_0], name="copy", uid="copy", index=7)
    cluster.vanish(ROLLOUT_1)
    cluster.settle()
    assert cluster.attempt.reason == "PodsDisrupted"


def its_creation_is_refused(cluster: SimulatedCluster) -> None:
    cluster.facts = {"refused": "exceeded quota"}
    cluster.vanish(ROLLOUT_1)


def its_node_is_lost(cluster: SimulatedCluster) -> None:
    cluster.place(ROLLOUT_1, node="lost-node")
    cluster.nodes = (CPU_NODE, GPU_NODE, replace(GPU_NODE, name="lost-node", unreachable_since=cluster.now))
    cluster.delete_pod(ROLLOUT_1)


@pytest.mark.parametrize("lose", [its_creation_is_refused, its_node_is_lost])
@pytest.mark.parametrize("stop", [lambda cluster: cluster.change_spec(suspend=True), SimulatedCluster.delete_job])
def test_a_controller_that_works_without_it_has_time_to_commit(lose: Any, stop: Any) -> None:
    cluster = running()
    lose(cluster)
    cluster.settle()
    stop(cluster)
    cluster.settle()
    assert cluster.pods[CONTROLLER].deletion_grace_seconds == cluster.settings.termination_grace_seconds
