"""A permanently lost node: its pods never terminate; the job reports this, and continues if that is safe."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from rljob_api.conditions import ConditionType
from rljob_api.exit_codes import ExitCode
from rljob_operator.reconcile.desired import PodDeletion
from rljob_testing.simulated_cluster import (
    CONTROLLER,
    CPU_NODE,
    GPU_NODE,
    POLICY_0,
    SETTINGS,
    SimulatedCluster,
    job_spec,
)

ROLLOUT_0, ROLLOUT_1 = "demo-rollout-0", "demo-rollout-1"
DISAGGREGATED = job_spec(topology="Disaggregated", policy={"replicas": 1}, rollout={"replicas": 2})
SCHEDULED, STALLED = ConditionType.SCHEDULED, ConditionType.STALLED


def running(spec: dict[str, Any] = DISAGGREGATED, lost_pod: str = ROLLOUT_1, **cluster: Any) -> SimulatedCluster:
    """A job that has committed 3 steps, with one pod on a separate node, `lost-node`."""
    nodes = (CPU_NODE, GPU_NODE, replace(GPU_NODE, name="lost-node"))
    running = SimulatedCluster(spec=spec, nodes=nodes, **cluster)
    running.settle()
    running.place()
    running.place(lost_pod, node="lost-node")
    running.start()
    running.ready()
    running.settle()
    running.reports(3)
    running.settle()
    return running


def lose_node(cluster: SimulatedCluster) -> None:
    lost = replace(GPU_NODE, name="lost-node", usable=False, unreachable_since=cluster.now)
    cluster.nodes = (CPU_NODE, GPU_NODE, lost)


def pass_time(cluster: SimulatedCluster, seconds: float) -> None:
    """The operator looks when it asked to; the kubelets that still report end their pods."""
    until = cluster.now + timedelta(seconds=seconds)
    while cluster.now < until:
        cluster.settle()
        for pod in list(cluster.pods.values()):
            if pod.deleting and pod.node != "lost-node":
                cluster.vanish(pod.name)
        cluster.settle()
        wait = cluster.last.requeue_after_seconds
        cluster.tick(min(wait or seconds, (until - cluster.now).total_seconds()))


def lose_rollout(cluster: SimulatedCluster) -> None:
    lose_node(cluster)
    cluster.end(CONTROLLER, ExitCode.WORKER_LOST, sentence="rollout-1 died while generating", step=3)


def test_a_lost_worker_is_reported_with_its_node_and_removed_later() -> None:
    cluster = running()
    lose_rollout(cluster)
    pass_time(cluster, 150)
    condition = cluster.condition(SCHEDULED)
    assert (condition.status, condition.reason) == ("False", "NodeLost")
    assert condition.message == (
        "pod demo-rollout-1 should have terminated by 2026-01-01 00:00:40 UTC and has not; its node lost-node has been "
        "unreachable since 2026-01-01 00:00:00 UTC; the operator removes the pod at 2026-01-01 00:05:40 UTC, and the "
        "job continues without it"
    )
    assert not cluster.holds(STALLED)
    assert list(cluster.pods) == [ROLLOUT_1]
    assert cluster.events.count("NodeLost") == 1
    pass_time(cluster, 200)
    assert cluster.events.count("PodRemoved") == 1
    assert cluster.attempt.number == 2
    assert len(cluster.pods) == 4
    assert cluster.run().phase == "Running"


def test_the_pods_of_one_attempt_are_gone_before_the_next_begins() -> None:
    cluster = running()
    lose_rollout(cluster)
    pass_time(cluster, 330)
    assert cluster.attempt.number == 1


def test_a_lost_controller_waits_for_a_person() -> None:
    cluster = running(lost_pod=CONTROLLER)
    lose_node(cluster)
    cluster.end(ROLLOUT_0, ExitCode.WORKER_LOST, sentence="the controller is gone")
    pass_time(cluster, 4_000)
    assert list(cluster.pods) == [CONTROLLER], "the workers hold no GPUs meanwhile"
    stalled = cluster.condition(STALLED)
    assert (stalled.status, stalled.reason) == ("True", "PodNotTerminating")
    assert "its node lost-node has been unreachable since" in stalled.message
    assert "kubectl taint nodes lost-node node.kubernetes.io/out-of-service=nodeshutdown:NoExecute" in stalled.message
    assert cluster.events.count("PodNotTerminating") == 1
    assert cluster.last.requeue_after_seconds is not None
    cluster.vanish(CONTROLLER)  # as the garbage collector does after the taint
    pass_time(cluster, 60)
    assert not cluster.holds(STALLED)
    assert cluster.attempt.number == 2


def test_pods_of_another_trainer_are_never_removed_by_force() -> None:
    spec = job_spec(trainer={"image": "registry/trainer:1", "command": ["train"]})
    cluster = running(spec, lost_pod=POLICY_0)
    lose_node(cluster)
    cluster.delete_pod(POLICY_0)
    pass_time(cluster, 4_000)
    assert list(cluster.pods) == [POLICY_0]
    assert cluster.condition(STALLED).reason == "PodNotTerminating"


@pytest.mark.parametrize("since", [None, "gone"])
def test_a_pod_is_not_removed_unless_its_node_is_unreachable(since: str | None) -> None:
    cluster = running()
    if since == "gone":
        cluster.nodes = (CPU_NODE, GPU_NODE)
    cluster.end(CONTROLLER, ExitCode.WORKER_LOST, sentence="rollout-1 died while generating", step=3)
    pass_time(cluster, 4_000)
    assert list(cluster.pods) == [ROLLOUT_1]
    said = "no longer exists" if since == "gone" else "the kubelet of its node lost-node reports"
    assert said in cluster.condition(STALLED).message


def test_removal_can_be_disabled() -> None:
    cluster = running(settings=SETTINGS.model_copy(update={"lost_node_seconds": 0.0}))
    lose_rollout(cluster)
    pass_time(cluster, 4_000)
    assert list(cluster.pods) == [ROLLOUT_1]
    assert cluster.condition(STALLED).reason == "PodNotTerminating"


def test_a_pod_that_a_finalizer_keeps_is_removed_by_force_once() -> None:
    cluster = running()
    lose_rollout(cluster)
    pass_time(cluster, 300)
    cluster.tick(60)
    assert PodDeletion(ROLLOUT_1, cluster.pods[ROLLOUT_1].uid, 0) in cluster.decide().delete_pods
    cluster.change_pod(ROLLOUT_1, deletion_grace_seconds=0)
    assert cluster.round().delete_pods == ()
    assert "has a finalizer" in cluster.condition(SCHEDULED).message


def test_a_pod_without_a_node_that_a_finalizer_keeps_is_reported() -> None:
    cluster = SimulatedCluster()
    cluster.settle()
    cluster.change_pod(POLICY_0, deleting=True, deletion_grace_seconds=0, deletion_due_at=cluster.now)
    cluster.change_spec(suspend=True)
    for _ in range(4):
        cluster.tick(30)
        cluster.settle()
    assert cluster.condition(STALLED).reason == "PodNotTerminating"
    assert "it has no node. A finalizer keeps it: kubectl describe pod" in cluster.condition(STALLED).message


def test_nothing_is_reported_while_a_node_returns_in_time() -> None:
    cluster = running()
    lose_rollout(cluster)
    pass_time(cluster, 30)
    cluster.nodes = (CPU_NODE, GPU_NODE, replace(GPU_NODE, name="lost-node"))
    cluster.vanish(ROLLOUT_1)
    pass_time(cluster, 60)
    assert not {"NodeLost", "PodNotTerminating", "PodRemoved"} & set(cluster.events)
    assert cluster.attempt.number == 2


def test_the_pods_of_a_deleted_job_go_with_their_lost_node() -> None:
    cluster = running()
    lose_node(cluster)
    cluster.delete_job()
    pass_time(cluster, 1200)
    assert cluster.gone
    assert cluster.events.count("PodRemoved") == 1


def test_a_deleted_job_reports_the_lost_controller_that_keeps_it() -> None:
    cluster = running(lost_pod=CONTROLLER)
    lose_node(cluster)
    cluster.delete_job()
    pass_time(cluster, 4_000)
    assert not cluster.gone
    assert cluster.condition(STALLED).reason == "PodNotTerminating"
    assert "kubectl taint nodes lost-node" in cluster.condition(STALLED).message
    assert cluster.condition(ConditionType.RUNNING).message == "the job is being deleted"
    assert cluster.events.count("PodNotTerminating") == 1
    cluster.finalizer = False  # a person removes it; another finalizer keeps the job
    assert cluster.round().finalizer is None
    cluster.finalizer = True
    cluster.vanish(CONTROLLER)
    cluster.settle()
    assert cluster.gone


def test_a_suspended_job_reports_the_pod_that_keeps_it() -> None:
    cluster = running()
    lose_node(cluster)
    cluster.change_spec(suspend=True)
    pass_time(cluster, 200)
    assert cluster.condition(SCHEDULED).reason == "NodeLost"
    pass_time(cluster, 600)
    assert cluster.phase == "Suspended"
