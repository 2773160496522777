"""Placement of pods, reports of unplaced pods, and release of half-placed jobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rljob_api.conditions import ConditionType
from rljob_operator.reconcile.observed import ObservedNode
from rljob_testing.simulated_cluster import (
    CONTROLLER,
    CPU_NODE,
    GPU_NODE,
    POLICY_0,
    POLICY_1,
    SETTINGS,
    SimulatedCluster,
    job_spec,
)


def scheduled(cluster: SimulatedCluster) -> tuple[str, str, str]:
    condition = cluster.condition(ConditionType.SCHEDULED)
    return condition.status, condition.reason, condition.message


def controller_affinity(cluster: SimulatedCluster) -> dict[str, Any]:
    cluster.round()
    manifests = cluster.round().create
    pod = next(manifest for manifest in manifests if manifest["metadata"]["name"] == CONTROLLER)
    affinity: dict[str, Any] = pod["spec"]["affinity"]["nodeAffinity"]
    return affinity


REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


@pytest.mark.parametrize(
    ("nodes", "required"),
    [
        ((CPU_NODE, GPU_NODE), True),
        ((GPU_NODE,), False),
        ((), False),
        ((ObservedNode("cordoned", gpus=0, usable=False), GPU_NODE), False),
        ((ObservedNode("control-plane", gpus=0, usable=True, tainted=True), GPU_NODE), False),
    ],
)
def test_the_controller_requires_a_gpu_free_node_where_there_is_one(
    nodes: tuple[ObservedNode, ...], required: bool
) -> None:
    assert (REQUIRED in controller_affinity(SimulatedCluster(nodes=nodes))) == required


TAINTED_GPU_NODE = ObservedNode("gpu-node", gpus=8, usable=True, tainted=True)


@pytest.mark.parametrize(
    ("nodes", "watch_nodes", "tolerates"),
    [
        ((), True, False),  # such as a cluster of GKE Autopilot, which refuses the toleration
        ((GPU_NODE,), True, False),
        ((TAINTED_GPU_NODE,), True, True),
        ((replace(TAINTED_GPU_NODE, usable=False),), True, False),
        ((CPU_NODE, TAINTED_GPU_NODE), True, False),
        ((), False, True),
    ],
)
def test_the_controller_tolerates_gpu_nodes_only_if_it_needs_one(
    nodes: tuple[ObservedNode, ...], watch_nodes: bool, tolerates: bool
) -> None:
    cluster = SimulatedCluster(nodes=nodes, settings=SETTINGS.model_copy(update={"watch_nodes": watch_nodes}))
    cluster.round()
    [pod] = [made for made in cluster.round().create if made["metadata"]["name"] == CONTROLLER]
    assert bool(pod["spec"].get("tolerations")) == tolerates


def test_tainted_nodes_count_where_the_controller_tolerates_taints() -> None:
    template = {"spec": {"tolerations": [{"key": "cpu-pool", "operator": "Exists"}]}}
    nodes = (ObservedNode("cpu-pool", gpus=0, usable=True, tainted=True), GPU_NODE)
    cluster = SimulatedCluster(spec=job_spec(controller={"template": template}), nodes=nodes)
    assert REQUIRED in controller_affinity(cluster)


def test_a_job_that_insists_on_a_gpu_free_node_waits_for_one() -> None:
    cluster = SimulatedCluster(spec=job_spec(controller={"requireGpuFreeNode": True}), nodes=(GPU_NODE,))
    assert cluster.settle().requeue_after_seconds == 60
    assert scheduled(cluster)[:2] == ("False", "NoGpuFreeNode")
    assert cluster.pods == {}
    cluster.nodes = (GPU_NODE, CPU_NODE)
    assert cluster.run().phase == "Running"


def test_a_controller_on_a_gpu_node_is_told_of() -> None:
    cluster = SimulatedCluster(nodes=(GPU_NODE,))
    cluster.settle()
    cluster.place(node="gpu-node")
    cluster.start()
    cluster.ready()
    cluster.settle()
    assert scheduled(cluster)[:2] == ("True", "ControllerOnGpuNode")
    assert cluster.events == ["ControllerOnGpuNode"]


@pytest.mark.parametrize(
    ("spec", "pod", "field"),
    [
        ({"policy": {"gpusPerReplica": 16}}, POLICY_0, "policy.gpusPerReplica"),
        (
            {"topology": "Disaggregated", "rollout": {"gpusPerReplica": 16}},
            "demo-rollout-0",
            "rollout.gpusPerReplica",
        ),
    ],
)
def test_a_gpu_count_that_no_node_has_is_said_with_the_numbers(spec: dict[str, Any], pod: str, field: str) -> None:
    cluster = SimulatedCluster(spec=job_spec(**spec))
    cluster.settle()
    cluster.unschedulable("0/2 nodes are available: 2 Insufficient nvidia.com/gpu.", pod)
    cluster.settle()
    assert scheduled(cluster) == (
        "False",
        "Unschedulable",
        "no node has 16 nvidia.com/gpu: the largest, gpu-node, has 8; add a node, or delete the job and create it "
        f"again with a lower {field}",
    )


def test_more_gpus_than_the_cluster_has_are_said_with_the_numbers() -> None:
    cluster = SimulatedCluster(spec=job_spec(policy={"replicas": 2, "gpusPerReplica": 8}))
    cluster.settle()
    cluster.unschedulable("0/2 nodes are available: 2 Insufficient nvidia.com/gpu.", POLICY_1)
    cluster.settle()
    assert "the job requests 16 nvidia.com/gpu, but all usable nodes together have 8" in scheduled(cluster)[2]


def test_otherwise_the_scheduler_is_quoted() -> None:
    cluster = SimulatedCluster()
    cluster.settle()
    cluster.unschedulable("0/2 nodes are available: 2 Insufficient memory.", POLICY_0, POLICY_1)
    cluster.settle()
    assert scheduled(cluster)[2] == "pod demo-policy-0 (and 1 more): 0/2 nodes are available: 2 Insufficient memory."


def half_placed(**spec: Any) -> SimulatedCluster:
    cluster = SimulatedCluster(spec=job_spec(**spec))
    cluster.settle()
    cluster.place(CONTROLLER, POLICY_0)
    cluster.unschedulable("0/2 nodes are available: 2 Insufficient nvidia.com/gpu.", POLICY_1)
    return cluster


def test_a_half_placed_job_releases_all_its_pods_and_tries_again_later() -> None:
    cluster = half_placed()
    assert cluster.settle().requeue_after_seconds == 600
    cluster.tick(600)
    cluster.settle()
    cluster.finish_deletions()
    cluster.settle()
    cluster.finish_deletions()
    assert cluster.pods == {}
    wait = cluster.settle().requeue_after_seconds
    assert wait is not None
    assert 60 <= wait <= 90
    status, reason, message = scheduled(cluster)
    assert (status, reason) == ("False", "PlacementTimedOut")
    assert "only 2 of 3 pods were scheduled" in message
    cluster.tick(wait)
    cluster.run()
    assert cluster.phase == "Running"
    assert cluster.status is not None
    assert cluster.status.restarts == 0
    assert [attempt.number for attempt in cluster.status.attempts] == [2], "what never ran leaves no record"
    assert cluster.attempt.placement_retries == 1


def test_waits_between_tries_to_place_double_up_to_tenfold() -> None:
    cluster = SimulatedCluster()
    waits = []
    for _ in range(6):
        cluster.settle()
        cluster.place(CONTROLLER)
        cluster.tick(600)
        for _ in range(3):
            cluster.settle()
            cluster.finish_deletions()
        waits.append(cluster.settle().requeue_after_seconds or 0)
        cluster.tick(waits[-1])
    assert [wait / waits[0] for wait in waits] == pytest.approx([1, 2, 4, 8, 10, 10], abs=0.05)


def test_the_placement_timeout_starts_with_the_last_placed_pod() -> None:
    cluster = SimulatedCluster()
    cluster.settle()
    cluster.tick(5000)
    cluster.place(CONTROLLER)
    cluster.settle()
    assert set(cluster.pods) == {CONTROLLER, POLICY_0, POLICY_1}
    assert not any(pod.deleting for pod in cluster.pods.values())


def test_pods_created_after_a_crash_get_their_placement_time() -> None:
    cluster = SimulatedCluster()
    cluster.settle()
    cluster.place(CONTROLLER)
    for name in (POLICY_0, POLICY_1):
        cluster.vanish(name)
    cluster.tick(1000)
    assert cluster.settle().requeue_after_seconds == 600
    assert set(cluster.pods) == {CONTROLLER, POLICY_0, POLICY_1}
    cluster.tick(600)
    cluster.settle()
    assert cluster.pods[CONTROLLER].deleting


@pytest.mark.parametrize(
    ("spec", "facts"),
    [
        ({"gang": "Disabled"}, {}),
        ({"gang": "Volcano"}, {"volcano_installed": True}),
        ({}, {"volcano_installed": True}),
        ({"queueName": "team"}, {"kueue_installed": True}),
    ],
)
def test_who_has_another_gang_scheduler_or_none_keeps_its_pods(spec: dict[str, Any], facts: dict[str, Any]) -> None:
    cluster = SimulatedCluster(spec=job_spec(**spec), facts=facts)
    cluster.settle()
    cluster.place(CONTROLLER)
    cluster.tick(6000)
    cluster.change_pod(CONTROLLER, started=True)
    cluster.settle()
    assert not any(pod.deleting for pod in cluster.pods.values())


@pytest.mark.parametrize("edit", [{"queueName": "team"}, {"gang": "Volcano"}])
def test_pods_created_before_an_edit_of_the_gang_are_still_released(edit: dict[str, Any]) -> None:
    installed = {"kueue_installed": True, "volcano_installed": False}
    cluster = SimulatedCluster(spec=job_spec(), facts=installed)
    cluster.settle()
    cluster.place(CONTROLLER)
    cluster.start(CONTROLLER)
    cluster.change_spec(**edit)
    cluster.settle()
    cluster.tick(6000)
    cluster.settle()
    assert cluster.pods[CONTROLLER].deleting
    assert cluster.attempt.reason == "PlacementTimedOut"


def test_pods_of_a_group_are_left_to_its_scheduler_after_an_edit() -> None:
    cluster = SimulatedCluster(spec=job_spec(queueName="team"), facts={"kueue_installed": True})
    cluster.settle()
    cluster.place(CONTROLLER)
    cluster.start(CONTROLLER)
    cluster.change_spec(queueName=None)
    cluster.tick(6000)
    cluster.settle()
    assert not any(pod.deleting for pod in cluster.pods.values())


@pytest.mark.parametrize("spec", [{"gang": "Volcano"}, {"queueName": "team"}])
def test_a_gang_scheduler_that_is_not_there_is_waited_for(spec: dict[str, Any]) -> None:
    cluster = SimulatedCluster(spec=job_spec(**spec))
    cluster.settle()
    assert scheduled(cluster)[:2] == ("False", "GangSchedulerMissing")
    assert cluster.pods == {}
    cluster.facts = {"volcano_installed": True, "kueue_installed": True}
    assert cluster.run().phase == "Running"


def test_pods_held_by_kueue_wait_for_their_queue() -> None:
    cluster = SimulatedCluster(spec=job_spec(queueName="team"), facts={"kueue_installed": True})
    cluster.settle()
    for name in cluster.pods:
        cluster.change_pod(name, gated=True)
    cluster.settle()
    assert scheduled(cluster)[1] == "WaitingForQueue"
    assert "team" in scheduled(cluster)[2]


QUEUE_LABEL = {"kueue.x-k8s.io/queue-name": "team"}


def test_the_label_of_kueue_names_the_queue_of_a_job_without_queue_name() -> None:
    cluster = SimulatedCluster(spec=job_spec(), labels=QUEUE_LABEL)
    cluster.settle()
    message = "the label kueue.x-k8s.io/queue-name is team, but the cluster has no Kueue"
    assert scheduled(cluster)[1] == "GangSchedulerMissing"
    assert message in scheduled(cluster)[2]

    cluster.facts = {"kueue_installed": True}
    desired = next(desired for _ in range(9) if (desired := cluster.round()).create)
    pods = [created for created in desired.create if created["kind"] == "Pod"]
    assert len(pods) == 3
    for pod in pods:
        assert QUEUE_LABEL.items() <= pod["metadata"]["labels"].items()
        assert pod["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"] == "demo-rljob-1"
        assert pod["spec"]["schedulingGates"] == [{"name": "kueue.x-k8s.io/admission"}]
    for name in cluster.pods:
        cluster.change_pod(name, gated=True)
    cluster.settle()
    assert scheduled(cluster)[1] == "WaitingForQueue"
    assert cluster.status is not None
    assert cluster.status.start_time is None, "the time in the queue does not count"


@pytest.mark.parametrize("labels", [{}, QUEUE_LABEL])
def test_queue_name_precedes_the_label(labels: dict[str, str]) -> None:
    spec = job_spec(queueName="mine")
    cluster = SimulatedCluster(spec=spec, labels=labels, facts={"kueue_installed": True})
    desired = next(desired for _ in range(9) if (desired := cluster.round()).create)
    assert {pod["metadata"]["labels"].get("kueue.x-k8s.io/queue-name") for pod in desired.create[-3:]} == {"mine"}


def test_an_empty_label_names_no_queue() -> None:
    cluster = SimulatedCluster(labels={"kueue.x-k8s.io/queue-name": ""})
    assert cluster.run().phase == "Running"


def test_a_job_with_the_label_that_asks_for_volcano_is_refused() -> None:
    """As the API server refuses it with queueName."""
    facts = {"kueue_installed": True, "volcano_installed": True}
    cluster = SimulatedCluster(spec=job_spec(gang="Volcano"), labels=QUEUE_LABEL, facts=facts)
    cluster.settle()
    assert cluster.pods == {}
    stalled = cluster.condition(ConditionType.STALLED)
    assert stalled.reason == "InvalidSpec"
    assert "write gang: Auto, or remove the label" in stalled.message
    cluster.labels = {}
    assert cluster.run().phase == "Running"
