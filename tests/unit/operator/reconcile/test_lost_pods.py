"""Pods lost with their nodes, and rollout pods that are replaced in the same attempt."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_operator.reconcile.desired import PodDeletion
from rljob_operator.reconcile.observed import ContainerTermination
from rljob_operator.reconcile.pod_replacement import MAX_REPLACEMENTS
from rljob_testing.simulated_cluster import (
    CONTROLLER,
    CPU_NODE,
    GPU_NODE,
    POLICY_0,
    SETTINGS,
    OperatorDied,
    SimulatedCluster,
    created_job,
    job_spec,
)

ROLLOUT_0, ROLLOUT_1, ROLLOUT_2 = "demo-rollout-0", "demo-rollout-1", "demo-rollout-2"
LOST_NODE = replace(GPU_NODE, name="lost-node")
TAINT = "kubectl taint nodes lost-node node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"


def running(rollouts: int = 2, on_lost_node: str | None = None, **cluster: Any) -> SimulatedCluster:
    """A disaggregated job that has committed 3 steps. `on_lost_node`: a pod on a separate node."""
    spec = job_spec(topology="Disaggregated", policy={"replicas": 1}, rollout={"replicas": rollouts})
    running = SimulatedCluster(**{"spec": spec, "nodes": (CPU_NODE, GPU_NODE, LOST_NODE), **cluster})
    running.settle()
    running.place()
    if on_lost_node:
        running.place(on_lost_node, node="lost-node")
    running.start()
    running.ready()
    running.settle()
    running.reports(3)
    running.settle()
    return running


def lose_node(cluster: SimulatedCluster) -> None:
    cluster.nodes = (CPU_NODE, GPU_NODE, replace(LOST_NODE, usable=False, unreachable_since=cluster.now))


def end_controller(cluster: SimulatedCluster) -> None:
    cluster.end(CONTROLLER, ExitCode.WORKER_LOST, sentence="rollout-1 died while generating", step=3)


def lost_rollout(**cluster: Any) -> SimulatedCluster:
    lost = running(on_lost_node=ROLLOUT_1, **cluster)
    lose_node(lost)
    end_controller(lost)
    return lost


def pass_time(cluster: SimulatedCluster, seconds: float) -> None:
    """The operator looks when it asked to; the kubelets that still report end their pods."""
    until = cluster.now + timedelta(seconds=seconds)
    while cluster.now < until:
        cluster.settled()
        for pod in list(cluster.pods.values()):
            if pod.deleting and pod.node != "lost-node":
                cluster.vanish(pod.name)
        cluster.settled()
        wait = cluster.last.requeue_after_seconds
        cluster.tick(min(wait or seconds, (until - cluster.now).total_seconds()))


def bring_up(cluster: SimulatedCluster, name: str) -> None:
    cluster.place(name).start(name).ready(name).settled()


# --- lost nodes ---


def test_a_lost_worker_is_reported_with_its_node_and_removed_later() -> None:
    cluster = lost_rollout()
    pass_time(cluster, 150)
    cluster.expect(scheduled="NodeLost", stalled=False, pods={ROLLOUT_1})
    for text in (
        "pod demo-rollout-1 should have terminated by 2026-01-01 00:00:40 UTC and has not",
        "its node lost-node has been unreachable since 2026-01-01 00:00:00 UTC",
        "the operator removes the pod at 2026-01-01 00:05:40 UTC, and the job continues without it",
    ):
        cluster.expect(scheduled_says=text, scheduled=False)
    assert cluster.events.count("NodeLost") == 1
    pass_time(cluster, 180)
    cluster.expect(number=1)  # the pods of one attempt are gone before the next begins
    pass_time(cluster, 20)
    assert cluster.events.count("PodRemoved") == 1
    cluster.expect(number=2)
    assert len(cluster.pods) == 4
    cluster.run().expect(phase="Running")


def test_a_lost_controller_waits_for_a_person() -> None:
    cluster = running(on_lost_node=CONTROLLER)
    lose_node(cluster)
    cluster.end(ROLLOUT_0, ExitCode.WORKER_LOST, sentence="the controller is gone")
    pass_time(cluster, 4_000)
    cluster.expect(pods={CONTROLLER}, stalled="PodNotTerminating", stalled_says=TAINT)  # the workers hold no GPUs
    cluster.expect(stalled=True, stalled_says="its node lost-node has been unreachable since")
    assert cluster.events.count("PodNotTerminating") == 1
    assert cluster.last.requeue_after_seconds is not None
    cluster.vanish(CONTROLLER)  # as the garbage collector does after the taint
    pass_time(cluster, 60)
    cluster.expect(stalled=False, number=2)


def test_pods_of_another_trainer_are_never_removed_by_force() -> None:
    spec = job_spec(trainer={"image": "registry/trainer:1", "command": ["train"]})
    cluster = running(spec=spec, on_lost_node=POLICY_0)
    lose_node(cluster)
    cluster.delete_pod(POLICY_0)
    pass_time(cluster, 4_000)
    cluster.expect(pods={POLICY_0}, stalled="PodNotTerminating")


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ((CPU_NODE, GPU_NODE, LOST_NODE), "the kubelet of its node lost-node reports"),
        ((CPU_NODE, GPU_NODE), "no longer exists"),
    ],
)
def test_a_pod_is_not_removed_unless_its_node_is_unreachable(nodes: Any, message: str) -> None:
    cluster = running(on_lost_node=ROLLOUT_1)
    cluster.nodes = nodes
    end_controller(cluster)
    pass_time(cluster, 4_000)
    cluster.expect(pods={ROLLOUT_1}, stalled_says=message)


def test_removal_can_be_disabled() -> None:
    cluster = lost_rollout(settings=SETTINGS.model_copy(update={"lost_node_seconds": 0.0}))
    pass_time(cluster, 4_000)
    cluster.expect(pods={ROLLOUT_1}, stalled="PodNotTerminating")


def test_a_pod_that_a_finalizer_keeps_is_removed_by_force_once() -> None:
    cluster = lost_rollout()
    pass_time(cluster, 300)
    cluster.tick(60)
    assert PodDeletion(ROLLOUT_1, cluster.pods[ROLLOUT_1].uid, 0) in cluster.decide().delete_pods
    cluster.change_pod(ROLLOUT_1, deletion_grace_seconds=0)
    assert cluster.round().delete_pods == ()
    cluster.expect(scheduled_says="has a finalizer")


def test_a_pod_without_a_node_that_a_finalizer_keeps_is_reported() -> None:
    cluster = created_job()
    cluster.change_pod(POLICY_0, deleting=True, deletion_grace_seconds=0, deletion_due_at=cluster.now)
    cluster.change_spec(suspend=True)
    for _ in range(4):
        cluster.tick(30).settled()
    cluster.expect(stalled="PodNotTerminating")
    cluster.expect(stalled_says="it has no node. A finalizer keeps it: kubectl describe pod")


def test_nothing_is_reported_while_a_node_returns_in_time() -> None:
    cluster = lost_rollout()
    pass_time(cluster, 30)
    cluster.nodes = (CPU_NODE, GPU_NODE, LOST_NODE)
    cluster.vanish(ROLLOUT_1)
    pass_time(cluster, 60)
    assert not {"NodeLost", "PodNotTerminating", "PodRemoved"} & set(cluster.events)
    cluster.expect(number=2)


def test_the_pods_of_a_deleted_job_go_with_their_lost_node() -> None:
    cluster = running(on_lost_node=ROLLOUT_1)
    lose_node(cluster)
    cluster.delete_job()
    pass_time(cluster, 1200)
    assert cluster.gone
    assert cluster.events.count("PodRemoved") == 1


def test_a_deleted_job_reports_the_lost_controller_that_keeps_it() -> None:
    cluster = running(on_lost_node=CONTROLLER)
    lose_node(cluster)
    cluster.delete_job()
    pass_time(cluster, 4_000)
    assert not cluster.gone
    cluster.expect(stalled="PodNotTerminating", stalled_says=TAINT, running_says="the job is being deleted")
    assert cluster.events.count("PodNotTerminating") == 1
    cluster.finalizer = False  # a person removes it; another finalizer keeps the job
    assert cluster.round().finalizer is None
    cluster.finalizer = True
    cluster.vanish(CONTROLLER).settled()
    assert cluster.gone


def test_a_suspended_job_reports_the_pod_that_keeps_it() -> None:
    cluster = running(on_lost_node=ROLLOUT_1)
    lose_node(cluster)
    cluster.change_spec(suspend=True)
    pass_time(cluster, 200)
    cluster.expect(scheduled="NodeLost")
    pass_time(cluster, 600)
    cluster.expect(phase="Suspended")


# --- a rollout pod that is lost while others generate ---


def test_a_vanished_rollout_pod_is_created_again_in_the_same_attempt() -> None:
    cluster = running()
    before = cluster.pods[ROLLOUT_1].uid
    cluster.vanish(ROLLOUT_1)
    desired = cluster.round()
    cluster.expect(replacing_pods=[ROLLOUT_1])
    assert desired.create == (), "the loss is recorded before a pod is created"
    cluster.settled(phase="Running", number=1, reason=None, replacing_pods=[ROLLOUT_1], pod_replacements=1)
    assert cluster.pods[ROLLOUT_1].uid != before
    assert cluster.events[-1] == "ReplacingPod"
    cluster.tick(20)
    cluster.settled(running_says="steps are being committed without demo-rollout-1, which the operator replaces")
    cluster.tick(1200)
    cluster.settled(number=1, deleting=set())  # though it has no node
    bring_up(cluster, ROLLOUT_1)
    cluster.expect(replacing_pods=[], pod_replacements=1, deleting=set(), running_says="steps are being committed")
    assert cluster.events[-1] == "PodReplaced"


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
    cluster.change_pod(ROLLOUT_1, **lost).settled(reason=None)
    assert cluster.pods[ROLLOUT_1].uid != before


def test_a_second_pod_is_replaced_while_the_first_still_terminates() -> None:
    cluster = running(rollouts=3)
    cluster.delete_pod(ROLLOUT_1).settled(deleting={ROLLOUT_1})
    before = cluster.pods[ROLLOUT_2].uid
    cluster.vanish(ROLLOUT_2).settled(deleting={ROLLOUT_1}, pod_replacements=2)
    assert cluster.pods[ROLLOUT_2].uid != before
    cluster.finish_deletions().settled(deleting=set(), number=1)
    assert ROLLOUT_1 in cluster.pods


def test_a_pod_on_a_lost_node_is_removed_and_replaced() -> None:
    cluster = running(on_lost_node=ROLLOUT_1)
    lose_node(cluster)
    cluster.delete_pod(ROLLOUT_1)  # as the node controller does
    for _ in range(20):
        cluster.tick(30).settled()
    assert cluster.pods[ROLLOUT_1].node is None
    assert cluster.events.count("PodRemoved") == 1
    cluster.expect(number=1)


def the_spec_has_changed(cluster: SimulatedCluster) -> None:
    cluster.change_spec(rollout={"replicas": 2, "template": {"spec": {"priorityClassName": "high"}}})


def it_was_replaced_too_often(cluster: SimulatedCluster) -> None:
    attempts = [cluster.attempt.model_copy(update={"pod_replacements": MAX_REPLACEMENTS})]
    cluster.set_status(cluster.stored.model_copy(update={"attempts": attempts}))


def they_are_a_group_of_kueue(cluster: SimulatedCluster) -> None:
    for name in cluster.pods:
        cluster.change_pod(name, in_group=True)


def there_is_a_copy_of_it(cluster: SimulatedCluster) -> None:
    cluster.pods["copy"] = replace(cluster.pods[ROLLOUT_0], name="copy", uid="copy", index=7)


@pytest.mark.parametrize(
    "also",
    [
        end_controller,
        lambda cluster: cluster.vanish(POLICY_0),
        lambda cluster: cluster.vanish(ROLLOUT_0),
        the_spec_has_changed,
        it_was_replaced_too_often,
        they_are_a_group_of_kueue,
        there_is_a_copy_of_it,
    ],
)
def test_otherwise_the_attempt_ends_and_is_not_counted(also: Any) -> None:
    cluster = running()
    also(cluster)
    cluster.vanish(ROLLOUT_1)
    for _ in range(3):
        cluster.tick(10).settled()
    cluster.expect(reason="PodsDisrupted", restarts=0)


def test_the_only_rollout_pod_ends_the_attempt() -> None:
    cluster = running(rollouts=1)
    cluster.vanish(ROLLOUT_0).settled(reason="PodsDisrupted")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"end": ContainerTermination(137, "OOMKilled", None, None)}, "HostOutOfMemory"),
        ({"end": ContainerTermination(137, "OOMKilled", None, None), "deleting": True}, "HostOutOfMemory"),
        ({"evicted": "Usage of EmptyDir volume exceeds the limit"}, "Evicted"),
    ],
)
def test_a_rollout_pod_that_exceeded_a_limit_is_a_failure(change: dict[str, Any], reason: str) -> None:
    cluster = running()
    cluster.change_pod(ROLLOUT_1, phase="Failed", ready=False, **change).settled(reason=reason)


@pytest.mark.parametrize("writes", range(6))
def test_an_operator_that_is_killed_at_any_write_replaces_it_once(writes: int) -> None:
    cluster = running()
    cluster.vanish(ROLLOUT_1)
    for _ in range(3):
        with suppress(OperatorDied):
            cluster.round(dies_after_writes=writes)
    cluster.settled(pod_replacements=1)
    bring_up(cluster, ROLLOUT_1)
    cluster.expect(replacing_pods=[])


def test_as_many_pods_are_replaced_as_the_limit_allows() -> None:
    cluster = running()
    for _ in range(MAX_REPLACEMENTS):
        cluster.vanish(ROLLOUT_1).settled()
        bring_up(cluster, ROLLOUT_1)
        cluster.tick(60)
    cluster.expect(reason=None, pod_replacements=MAX_REPLACEMENTS)
    cluster.vanish(ROLLOUT_1).settled(reason="PodsDisrupted")
    assert cluster.events.count("ReplacingPod") == MAX_REPLACEMENTS


def test_a_node_that_refuses_each_new_pod_causes_no_busy_loop() -> None:
    cluster = running()
    cluster.vanish(ROLLOUT_1).settled()
    pods = set()
    for _ in range(120):
        if cluster.pods[ROLLOUT_1].node is None:
            cluster.place(ROLLOUT_1)
            cluster.change_pod(ROLLOUT_1, phase="Failed", disruption="UnexpectedAdmissionError")
        pods.add(cluster.pods[ROLLOUT_1].uid)
        cluster.settled().tick(min(1.0, cluster.last.requeue_after_seconds or 1.0))
    assert 4 <= len(pods) <= 5
    why = "pod demo-rollout-1 was taken from node gpu-node (UnexpectedAdmissionError)"
    cluster.expect(reason=None, running_says=why)


def test_a_new_pod_that_neither_starts_nor_ends_causes_no_busy_loop() -> None:
    cluster = running()
    cluster.vanish(ROLLOUT_1).settled().place(ROLLOUT_1)
    cluster.tick(60).delete_pod(ROLLOUT_1)
    for _ in range(4):
        cluster.tick(900).settled(wait=60, reason=None)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"unschedulable": "2 Insufficient nvidia.com/gpu"}, "pod demo-rollout-1: 2 Insufficient nvidia.com/gpu"),
        ({"node": "gpu-node", "waiting": "ErrImagePull: x"}, "pod demo-rollout-1 cannot start: ErrImagePull: x"),
    ],
)
def test_running_names_the_reason_why_a_new_pod_does_not_come(facts: dict[str, Any], why: str) -> None:
    cluster = running()
    cluster.vanish(ROLLOUT_1).settled().change_pod(ROLLOUT_1, **facts)
    cluster.tick(20).settled(running_says=f"without demo-rollout-1, which the operator replaces: {why}")


def its_creation_is_refused(cluster: SimulatedCluster) -> None:
    cluster.facts = {"refused": "exceeded quota"}
    cluster.vanish(ROLLOUT_1)


def its_node_is_lost(cluster: SimulatedCluster) -> None:
    cluster.place(ROLLOUT_1, node="lost-node")
    lose_node(cluster)
    cluster.delete_pod(ROLLOUT_1)


@pytest.mark.parametrize("lose", [its_creation_is_refused, its_node_is_lost])
@pytest.mark.parametrize("stop", [lambda cluster: cluster.change_spec(suspend=True), SimulatedCluster.delete_job])
def test_a_controller_that_works_without_it_has_time_to_commit(lose: Any, stop: Any) -> None:
    cluster = running()
    lose(cluster)
    cluster.settled()
    stop(cluster)
    cluster.settled()
    assert cluster.pods[CONTROLLER].deletion_grace_seconds == cluster.settings.termination_grace_seconds
