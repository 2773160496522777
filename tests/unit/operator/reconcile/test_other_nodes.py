"""Remedies that need other nodes: more pods for the policy, and leaving a node whose GPU a foreign process holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rljob_api.attempt_settings import AttemptSettings
from rljob_api.exit_codes import ExitCode
from rljob_api.job import RLJob
from rljob_operator.reconcile.observed import ObservedNode
from rljob_testing.simulated_cluster import (
    CONTROLLER,
    CPU_NODE,
    GPU_NODE,
    PLAN,
    POLICY_0,
    POLICY_1,
    SimulatedCluster,
    new_job,
)
from tests.unit.operator.reconcile.memory_failures import PENDING, evidence, run_out, running, waiting

NO_SETTING_LEFT = {"maxAdjustments": 0}
STATE = {"class": "OptimizerState", "confidence": 0.9, "message": "the optimizer's state does not fit"}
GROWN = "the policy has grown from 1 to 2 GPUs"


def growing(most: int = 4, **spec: Any) -> SimulatedCluster:
    """One policy pod that may grow, and no change of a setting is allowed."""
    return running(**{"policy": {"replicas": 1}, "recovery": NO_SETTING_LEFT | {"maxGpus": most}, **spec})


def out_of_memory(cluster: SimulatedCluster, diagnosis: dict[str, Any] = STATE) -> SimulatedCluster:
    return run_out(cluster, rank=0, diagnoses=[diagnosis])


def test_the_policy_grows_until_it_has_all_gpus_that_it_may_have() -> None:
    cluster = growing()
    for pods in (2, 4):
        cluster.events.clear()
        out_of_memory(cluster).next_attempt_runs().expect(phase="Running", adjustments=0)
        assert len(cluster.names("policy")) == pods
        assert cluster.events == ["OutOfMemory", "PlanChanged", "AttemptStarted"]
        change = cluster.stored.plan_changes[-1]
        assert (cluster.plan.policy_gpus, change.remedy.after, change.level) == (pods, str(pods), "ReplacePods")
        assert [(of.role, of.desired) for of in cluster.stored.pods] == [("controller", 1), ("policy", pods)]
    message = "recovery.maxGpus is 4, and the policy has 4 GPUs"
    out_of_memory(cluster).settled(failed="AdjustmentsExhausted", failed_contains=message)


def created_after_growth(cluster: SimulatedCluster) -> dict[str, dict[str, Any]]:
    """Objects that the operator writes from an out-of-memory failure on, by kind and name."""
    out_of_memory(cluster)
    written: dict[str, dict[str, Any]] = {}
    for _ in range(12):
        desired = cluster.round()
        for manifest in (*desired.apply, *desired.create):
            written[f"{manifest['kind']}/{manifest['metadata']['name']}"] = manifest
        cluster.finish_deletions()
    return written


def test_pods_learn_of_the_growth_by_the_plan_and_the_manifest_stays() -> None:
    written = created_after_growth(growing())
    (settings,) = (manifest for name, manifest in written.items() if name.startswith("ConfigMap/"))
    texts = list(settings["data"].values())
    plans = [AttemptSettings.model_validate_json(text).memory_plan for text in texts if '"memoryPlan"' in text]
    assert [plan.policy_gpus for plan in plans if plan] == [2]
    (manifest,) = (text for text in texts if '"RLJob"' in text)
    assert RLJob.model_validate_json(manifest).spec.policy.replicas == 1
    worker = written["Pod/demo-policy-1"]["spec"]["containers"][0]
    assert {"name": "RLJOB_WORKERS", "value": "2"} in worker["env"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_a_queue_gets_the_whole_group() -> None:
    cluster = growing(2, queueName="gpus", facts={"kueue_installed": True})
    written = created_after_growth(cluster)
    pods = [manifest for name, manifest in written.items() if name.startswith("Pod/")]
    assert [pod["metadata"]["annotations"]["kueue.x-k8s.io/pod-group-total-count"] for pod in pods] == ["3"] * 3
    cluster.expect(scheduled="WaitingForQueue", scheduled_contains=GROWN)


def test_a_waiting_controller_is_not_restarted_in_pods_that_are_too_few() -> None:
    cluster = waiting(policy={"replicas": 1}, recovery=NO_SETTING_LEFT | {"maxGpus": 2})
    found = evidence(cluster, rank=0, diagnoses=[STATE])
    cluster.reports(3, plan=PLAN, last_evidence=found, pending_exit=PENDING)
    cluster.next_attempt_runs().expect(pods_of_attempt=None, pods={CONTROLLER, POLICY_0, POLICY_1})


def test_engines_with_pods_of_their_own_stay_as_they_are() -> None:
    cluster = out_of_memory(growing(topology="Disaggregated", rollout={"replicas": 1}))
    cluster.next_attempt_runs().expect(pods={CONTROLLER, POLICY_0, POLICY_1, "demo-rollout-0"})


def test_a_cluster_without_so_many_gpus_is_named() -> None:
    cluster = growing(most=16)
    cluster.nodes = (CPU_NODE, ObservedNode("gpu-node", gpus=1, usable=True))
    out_of_memory(cluster).stop().unschedulable("0/2 nodes are available", POLICY_1)
    too_few = "the job requests 2 nvidia.com/gpu, but all usable nodes together have 1: add nodes"
    grown = f"{GROWN} because it ran out of memory"
    cluster.settled(scheduled=(False, "Unschedulable"), scheduled_contains=(too_few, grown))


def test_a_quota_that_refuses_the_grown_policy_comes_with_the_way_back() -> None:
    cluster = out_of_memory(growing()).settled().finish_deletions().observes(refused="exceeded quota: gpus")
    cluster.settled(scheduled="PodsRefused", scheduled_contains=f"exceeded quota: gpus; {GROWN}").observes()
    cluster.change_spec(suspend=True).settled().change_spec(suspend=False, recovery=NO_SETTING_LEFT)
    assert cluster.next_attempt_runs().names("policy") == [POLICY_0]


@pytest.mark.parametrize("recovery", [{}, {"maxGpus": 2}])
def test_a_lower_limit_shrinks_the_policy_in_the_next_attempt(recovery: dict[str, int]) -> None:
    cluster = growing()
    for _ in range(2):
        out_of_memory(cluster).next_attempt_runs()
    cluster.change_spec(recovery=NO_SETTING_LEFT | recovery).settled(phase="Running")
    assert len(cluster.names("policy")) == 4, "the running attempt keeps its pods"
    assert cluster.delete_pod(POLICY_0).next_attempt_runs().names("policy") == [POLICY_0]


# --- a node is left to a foreign process ---

HELD_BY_ANOTHER_PROCESS = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.77 GiB. GPU 0 has a total capacity of 139.80 GiB "
    "of which 999.50 MiB is free. Including non-PyTorch memory, this process has 40.44 GiB memory in use. Process 3640 "
    "has 98.37 GiB memory in use. Of the allocated memory 39.87 GiB is allocated by PyTorch, and 896.00 KiB is "
    "reserved by PyTorch but unallocated."
)
FOREIGN = {"class": "ForeignProcess", "confidence": 0.8, "message": "98.38 GiB were held by other processes"}
SLEEPING_ENGINE = {
    "trainer": {"image": "registry.example/trl:1", "supportedSettings": ["rolloutSleep"]},
    "memory": {"rolloutSleep": "Level1"},
}
EIGHT_GPUS = replace(GPU_NODE, name="eight-gpus")
FOUR_GPUS = ObservedNode("four-gpus", gpus=4, usable=True)


def held_by_foreign_processes(times: int, nodes: tuple[ObservedNode, ...], **spec: Any) -> SimulatedCluster:
    """A job of another trainer, whose pod ran out of memory `times` times, on `gpu-node` each time."""
    given = {"policy": {"replicas": 1, "gpusPerReplica": 1}, **SLEEPING_ENGINE, **spec}
    cluster = new_job(**given, nodes=nodes)
    for _ in range(times):
        cluster.stop().tick(400).settled().place(POLICY_0, node="gpu-node").start().ready().settled()
        found = evidence(cluster, rank=0, step=1, phase=None, message=HELD_BY_ANOTHER_PROCESS)
        cluster.end(POLICY_0, 1, message="ran out", message_code=ExitCode.DEVICE_OUT_OF_MEMORY, evidence=found)
    return cluster.settled()


def test_processes_are_restarted_first_and_then_the_node_is_left() -> None:
    cluster = held_by_foreign_processes(2, (CPU_NODE, GPU_NODE, FOUR_GPUS))
    assert (cluster.remedies, cluster.plan.excluded_nodes) == (["processes", "excludedNodes"], ["gpu-node"])
    cluster.expect(recovering_contains="(adjustment 2 of 6)").stop().unschedulable("0/2 nodes are available", POLICY_0)
    cluster.settled(scheduled_contains="0/2 nodes are available; the memory plan excludes gpu-node: add another node")


@pytest.mark.parametrize(
    ("gpus", "other", "left"),
    [
        (8, FOUR_GPUS, False),
        (4, FOUR_GPUS, True),
        (4, replace(FOUR_GPUS, tainted=True), True),
        (4, replace(FOUR_GPUS, usable=False), False),
        (0, CPU_NODE, True),
        (0, replace(CPU_NODE, tainted=True), False),
    ],
    ids=["too few GPUs", "enough GPUs", "a GPU node's taint", "cordoned", "no GPUs wanted", "a taint of others"],
)
def test_a_node_is_excluded_only_if_another_one_takes_the_pod(gpus: int, other: ObservedNode, left: bool) -> None:
    cluster = held_by_foreign_processes(2, (GPU_NODE, other), policy={"replicas": 1, "gpusPerReplica": gpus})
    assert cluster.plan.excluded_nodes == (["gpu-node"] if left else [])


def test_where_no_other_node_is_left_the_failure_names_the_process() -> None:
    cluster = held_by_foreign_processes(3, (CPU_NODE, GPU_NODE), recovery={"maxRestarts": 1})
    held = "98.38 GiB of the GPU's 139.80 GiB were held by other processes"
    tried = "generation 2 (step 1, startup, ForeignProcess): restarting processes"
    advice = "no other node is known to have room: stop the other process on its node"
    cluster.expect(failed="RestartsExhausted", failed_contains=(held, tried, advice))


@pytest.mark.parametrize(
    ("policy", "rollout", "others", "left"),
    [
        ((2, 8), None, (EIGHT_GPUS,), False),
        ((2, 8), None, (EIGHT_GPUS, replace(EIGHT_GPUS, name="third")), True),
        ((2, 4), None, (EIGHT_GPUS,), True),
        ((1, 8), (1, 4), (FOUR_GPUS,), False),
        ((1, 8), (1, 4), (FOUR_GPUS, EIGHT_GPUS), True),
        ((1, 4), (2, 4), (EIGHT_GPUS,), False),
    ],
)
def test_a_node_is_excluded_only_if_all_workers_fit_without_it(
    policy: tuple[int, int], rollout: tuple[int, int] | None, others: tuple[ObservedNode, ...], left: bool
) -> None:
    """`policy`, `rollout`: number of pods, and GPUs of each."""
    spec: dict[str, Any] = {"policy": {"replicas": policy[0], "gpusPerReplica": policy[1]}}
    if rollout:
        spec |= {"topology": "Disaggregated", "rollout": {"replicas": rollout[0], "gpusPerReplica": rollout[1]}}
    cluster = running(**spec)
    cluster.nodes = (CPU_NODE, GPU_NODE, *others)
    for _ in range(2):
        out_of_memory(cluster, FOREIGN).next_attempt_runs()
    assert cluster.plan.excluded_nodes == (["gpu-node"] if left else [])


def test_an_unsupported_setting_is_no_evidence_about_the_engine() -> None:
    trainer = {"image": "registry.example/trl:1", "supportedSettings": []}
    cluster = held_by_foreign_processes(1, (CPU_NODE, GPU_NODE), trainer=trainer, memory={})
    last = cluster.stored.last_out_of_memory
    assert last is not None
    assert "the plan lets the engine stay awake" not in last.diagnosis.message
    assert cluster.remedies == ["processes"]
