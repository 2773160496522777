"""Pods lost with their nodes, and rollout pods that are replaced in the same attempt."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from rljob_api.conditions import ConditionType
from rljob_api.exit_codes import ExitCode
from rljob_operator.reconcile.desired import PodDeletion
from rljob_operator.reconcile.observed import ContainerTermination, ObservedNode
from rljob_operator.reconcile.pods import MAX_REPLACEMENTS
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
UNREACHABLE = "its node lost-node has been unreachable since 2026-01-01 00:00:00 UTC"


def running(rollouts: int = 2, on_lost_node: str | None = None, **cluster: Any) -> SimulatedCluster:
    """A disaggregated job that has committed 3 steps. `on_lost_node`: a pod on a separate node."""
    spec = job_spec(topology="Disaggregated", policy={"replicas": 1}, rollout={"replicas": rollouts})
    running = SimulatedCluster(**{"spec": spec, "nodes": (CPU_NODE, GPU_NODE, LOST_NODE), **cluster}).settled().place()
    if on_lost_node:
        running.place(on_lost_node, node="lost-node")
    return running.start().ready().settled().reports(3).settled()


def lose_node(cluster: SimulatedCluster) -> SimulatedCluster:
    cluster.nodes = (CPU_NODE, GPU_NODE, replace(LOST_NODE, usable=False, unreachable_since=cluster.now))
    return cluster


def end_controller(cluster: SimulatedCluster) -> SimulatedCluster:
    return cluster.end(CONTROLLER, ExitCode.WORKER_LOST, message="rollout-1 died while generating", step=3)


def lost_rollout(**cluster: Any) -> SimulatedCluster:
    return end_controller(lose_node(running(on_lost_node=ROLLOUT_1, **cluster)))


def pass_time(cluster: SimulatedCluster, seconds: float) -> SimulatedCluster:
    """The operator reconciles when it asked to; the kubelets that still report end their pods."""
    until = cluster.now + timedelta(seconds=seconds)
    while cluster.now < until:
        cluster.settle()
        for pod in list(cluster.pods.values()):
            if pod.deleting and pod.node != "lost-node":
                cluster.vanish(pod.name)
        cluster.settle()
        wait = cluster.last.requeue_after_seconds
        cluster.tick(min(wait or seconds, (until - cluster.now).total_seconds()))
    return cluster


def bring_up(cluster: SimulatedCluster, name: str) -> SimulatedCluster:
    return cluster.place(name).start(name).ready(name).settled()


# --- lost nodes ---


def test_a_lost_worker_is_reported_with_its_node_and_removed_later() -> None:
    cluster = pass_time(lost_rollout(), 150).expect(scheduled=(False, "NodeLost"), stalled=False, pods={ROLLOUT_1})
    late = "pod demo-rollout-1 should have terminated by 2026-01-01 00:00:40 UTC and has not"
    removal = "the operator removes the pod at 2026-01-01 00:05:40 UTC, and the job continues without it"
    cluster.expect(scheduled_contains=(late, UNREACHABLE, removal))
    assert cluster.events.count("NodeLost") == 1
    pass_time(cluster, 180).expect(number=1)  # the pods of one attempt are gone before the next begins
    pass_time(cluster, 20).expect(number=2)
    assert (cluster.events.count("PodRemoved"), len(cluster.pods)) == (1, 4)
    cluster.run().expect(phase="Running")


def test_a_lost_controller_waits_for_a_person() -> None:
    cluster = lose_node(running(on_lost_node=CONTROLLER))
    cluster.end(ROLLOUT_0, ExitCode.WORKER_LOST, message="the controller is gone")
    pass_time(cluster, 4_000).expect(pods={CONTROLLER})  # the workers hold no GPUs
    cluster.expect(stalled=(True, "PodNotTerminating"), stalled_contains=(UNREACHABLE, TAINT))
    assert cluster.events.count("PodNotTerminating") == 1
    assert cluster.last.requeue_after_seconds is not None
    cluster.vanish(CONTROLLER)  # as the garbage collector does after the taint
    pass_time(cluster, 60).expect(stalled=False, number=2)


OTHER_TRAINER = job_spec(trainer={"image": "registry/trainer:1", "command": ["train"]})
DISABLED = SETTINGS.model_copy(update={"lost_node_seconds": 0.0})


def leave_node(cluster: SimulatedCluster, *nodes: ObservedNode) -> SimulatedCluster:
    cluster.nodes = (CPU_NODE, GPU_NODE, *nodes)
    return end_controller(cluster)


@pytest.mark.parametrize(
    ("stuck", "pod", "message"),
    [
        (lambda: lost_rollout(settings=DISABLED), ROLLOUT_1, UNREACHABLE),
        (lambda: leave_node(running(on_lost_node=ROLLOUT_1)), ROLLOUT_1, "no longer exists"),
        (lambda: leave_node(running(on_lost_node=ROLLOUT_1), LOST_NODE), ROLLOUT_1, "the kubelet of its node"),
        (
            lambda: lose_node(running(spec=OTHER_TRAINER, on_lost_node=POLICY_0)).delete_pod(POLICY_0),
            POLICY_0,
            UNREACHABLE,
        ),
    ],
    ids=["disabled", "the node is gone", "the node is ready", "another trainer"],
)
def test_a_pod_that_is_not_removed_by_force_stalls_the_job(stuck: Any, pod: str, message: str) -> None:
    pass_time(stuck(), 4_000).expect(pods={pod}, stalled="PodNotTerminating", stalled_contains=message)


def test_a_pod_that_a_finalizer_keeps_is_removed_by_force_once() -> None:
    cluster = pass_time(lost_rollout(), 300).tick(60)
    assert PodDeletion(ROLLOUT_1, cluster.pods[ROLLOUT_1].uid, 0) in cluster.decide().delete_pods
    assert cluster.change_pod(ROLLOUT_1, deletion_grace_seconds=0).round().delete_pods == ()
    cluster.expect(scheduled_contains="has a finalizer")


def test_a_pod_without_a_node_that_a_finalizer_keeps_is_reported() -> None:
    cluster = created_job()
    cluster.change_pod(POLICY_0, deleting=True, deletion_grace_seconds=0, deletion_due_at=cluster.now)
    cluster.change_spec(suspend=True)
    for _ in range(4):
        cluster.tick(30).settled()
    message = "it has no node. A finalizer keeps it: kubectl describe pod"
    cluster.expect(stalled="PodNotTerminating", stalled_contains=message)


def test_nothing_is_reported_while_a_node_returns_in_time() -> None:
    cluster = pass_time(lost_rollout(), 30).vanish(ROLLOUT_1)
    cluster.nodes = (CPU_NODE, GPU_NODE, LOST_NODE)
    pass_time(cluster, 60).expect(number=2)
    assert not {"NodeLost", "PodNotTerminating", "PodRemoved"} & set(cluster.events)


def test_the_pods_of_a_deleted_or_suspended_job_go_with_their_lost_node() -> None:
    cluster = pass_time(lose_node(running(on_lost_node=ROLLOUT_1)).delete_job(), 1200)
    assert (cluster.gone, cluster.events.count("PodRemoved")) == (True, 1)
    cluster = lose_node(running(on_lost_node=ROLLOUT_1)).change_spec(suspend=True)
    pass_time(cluster, 200).expect(scheduled="NodeLost")
    pass_time(cluster, 600).expect(phase="Suspended")


def test_a_deleted_job_reports_the_lost_controller_that_keeps_it() -> None:
    cluster = pass_time(lose_node(running(on_lost_node=CONTROLLER)).delete_job(), 4_000)
    assert not cluster.gone
    cluster.expect(stalled="PodNotTerminating", stalled_contains=TAINT, running_contains="the job is being deleted")
    assert cluster.events.count("PodNotTerminating") == 1
    cluster.finalizer = False  # a person removes it; another finalizer keeps the job
    assert cluster.round().finalizer is None
    cluster.finalizer = True
    assert cluster.vanish(CONTROLLER).settled().gone


# --- a rollout pod that is lost while others generate ---


def replacing(**facts: Any) -> SimulatedCluster:
    """`facts`: of the new pod."""
    return running().vanish(ROLLOUT_1).settled().change_pod(ROLLOUT_1, **facts)


def test_a_vanished_rollout_pod_is_created_again_in_the_same_attempt() -> None:
    cluster = running()
    before = cluster.pods[ROLLOUT_1].uid
    assert cluster.vanish(ROLLOUT_1).round().create == (), "the loss is recorded before a pod is created"
    cluster.expect(replacing_pods=[ROLLOUT_1])
    cluster.settled(phase="Running", number=1, reason=None, replacing_pods=[ROLLOUT_1], pod_replacements=1)
    assert cluster.pods[ROLLOUT_1].uid != before
    assert cluster.events[-1] == "ReplacingPod"
    message = "steps are being committed without demo-rollout-1, which the operator replaces"
    cluster.tick(20).settled(running_contains=message)
    cluster.tick(1200).settled(number=1, deleting=set())  # though it has no node
    bring_up(cluster, ROLLOUT_1).expect(replacing_pods=[], pod_replacements=1, deleting=set())
    assert cluster.condition(ConditionType.RUNNING).message == "steps are being committed"
    assert cluster.events[-1] == "PodReplaced"


@pytest.mark.parametrize(
    "lost",
    [
        {"disruption": "EvictionByEvictionAPI"},
        {"end": ContainerTermination(137, "ContainerStatusUnknown", None, None)},
    ],
)
def test_what_is_left_of_a_lost_pod_is_deleted(lost: dict[str, Any]) -> None:
    cluster = running()
    before = cluster.pods[ROLLOUT_1].uid
    cluster.change_pod(ROLLOUT_1, phase="Failed", ready=False, **lost).settled(reason=None)
    assert cluster.pods[ROLLOUT_1].uid != before


def test_a_second_pod_is_replaced_while_the_first_still_terminates() -> None:
    cluster = running(rollouts=3).delete_pod(ROLLOUT_1).settled(deleting={ROLLOUT_1})
    before = cluster.pods[ROLLOUT_2].uid
    cluster.vanish(ROLLOUT_2).settled(deleting={ROLLOUT_1}, pod_replacements=2)
    assert cluster.pods[ROLLOUT_2].uid != before
    cluster.finish_deletions().settled(deleting=set(), number=1)
    assert ROLLOUT_1 in cluster.pods


def test_a_pod_on_a_lost_node_is_removed_and_replaced() -> None:
    cluster = lose_node(running(on_lost_node=ROLLOUT_1)).delete_pod(ROLLOUT_1)  # as the node controller does
    for _ in range(20):
        cluster.tick(30).settled()
    assert cluster.pods[ROLLOUT_1].node is None
    assert cluster.expect(number=1).events.count("PodRemoved") == 1


NEW_TEMPLATE = {"replicas": 2, "template": {"spec": {"priorityClassName": "high"}}}


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
        lambda cluster: cluster.change_spec(rollout=NEW_TEMPLATE),
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
    running(rollouts=1).vanish(ROLLOUT_0).settled(reason="PodsDisrupted")


KILLED = {"end": ContainerTermination(137, "OOMKilled", None, None)}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (KILLED, "HostOutOfMemory"),
        (KILLED | {"deleting": True}, "HostOutOfMemory"),
        ({"evicted": "Usage of EmptyDir volume exceeds the limit"}, "Evicted"),
    ],
)
def test_a_rollout_pod_that_exceeded_a_limit_is_a_failure(change: dict[str, Any], reason: str) -> None:
    running().change_pod(ROLLOUT_1, phase="Failed", ready=False, **change).settled(reason=reason)


@pytest.mark.parametrize("writes", range(6))
def test_an_operator_that_is_killed_at_any_write_replaces_it_once(writes: int) -> None:
    cluster = running().vanish(ROLLOUT_1)
    for _ in range(3):
        with suppress(OperatorDied):
            cluster.round(dies_after_writes=writes)
    cluster.settled(pod_replacements=1)
    bring_up(cluster, ROLLOUT_1).expect(replacing_pods=[])


def test_as_many_pods_are_replaced_as_the_limit_allows() -> None:
    cluster = running()
    for _ in range(MAX_REPLACEMENTS):
        bring_up(cluster.vanish(ROLLOUT_1).settled(), ROLLOUT_1).tick(60)
    cluster.expect(reason=None, pod_replacements=MAX_REPLACEMENTS)
    cluster.vanish(ROLLOUT_1).settled(reason="PodsDisrupted")
    assert cluster.events.count("ReplacingPod") == MAX_REPLACEMENTS


def test_a_node_that_refuses_each_new_pod_causes_no_busy_loop() -> None:
    cluster = replacing()
    pods = set()
    for _ in range(120):
        if cluster.pods[ROLLOUT_1].node is None:
            cluster.place(ROLLOUT_1).change_pod(ROLLOUT_1, phase="Failed", disruption="UnexpectedAdmissionError")
        pods.add(cluster.pods[ROLLOUT_1].uid)
        cluster.settled().tick(min(1.0, cluster.last.requeue_after_seconds or 1.0))
    assert 4 <= len(pods) <= 5
    cause = "pod demo-rollout-1 was taken from node gpu-node (UnexpectedAdmissionError)"
    cluster.expect(reason=None, running_contains=cause)


def test_a_new_pod_that_neither_starts_nor_ends_causes_no_busy_loop() -> None:
    cluster = replacing().place(ROLLOUT_1).tick(60).delete_pod(ROLLOUT_1)
    for _ in range(4):
        cluster.tick(900).settled(wait=60, reason=None)


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        ({"unschedulable": "2 Insufficient nvidia.com/gpu"}, "pod demo-rollout-1: 2 Insufficient nvidia.com/gpu"),
        ({"node": "gpu-node", "waiting": "ErrImagePull: x"}, "pod demo-rollout-1 cannot start: ErrImagePull: x"),
    ],
)
def test_running_names_the_reason_why_a_new_pod_does_not_come(facts: dict[str, Any], cause: str) -> None:
    message = f"without demo-rollout-1, which the operator replaces: {cause}"
    replacing(**facts).tick(20).settled(running_contains=message)


@pytest.mark.parametrize(
    "lose",
    [
        lambda cluster: cluster.observes(refused="exceeded quota").vanish(ROLLOUT_1),
        lambda cluster: lose_node(cluster.place(ROLLOUT_1, node="lost-node")).delete_pod(ROLLOUT_1),
    ],
)
@pytest.mark.parametrize("stop", [lambda cluster: cluster.change_spec(suspend=True), SimulatedCluster.delete_job])
def test_a_controller_that_works_without_it_has_time_to_commit(lose: Any, stop: Any) -> None:
    cluster = stop(lose(running()).settled()).settled()
    assert cluster.pods[CONTROLLER].deletion_grace_seconds == cluster.settings.termination_grace_seconds
