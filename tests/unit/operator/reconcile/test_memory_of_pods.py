"""Memory that the pods are given: limits, /dev/shm, whose memory ran out, and trainers of other images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_api.job import RLJobSpec
from rljob_operator.objects.pod_layout import PodLayout
from rljob_testing.simulated_cluster import (
    CONTROLLER,
    CPU_NODE,
    GPU_NODE,
    PLAN,
    POLICY_0,
    POLICY_1,
    SimulatedCluster,
    job_spec,
    running_job,
)
from tests.unit.operator.reconcile.memory_failures import FRAGMENTED, GIB, evidence, run_out, running, trainers_change

ROLLOUT_0, ROLLOUT_1 = "demo-rollout-0", "demo-rollout-1"
PREDICTED: dict[str, Any] = {"model": {"uri": "hf://Qwen/Qwen3-8B"}}
"""A model whose memory the operator can predict, and so set a limit."""


def limited(memory: str) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "rljob", "resources": {"limits": {"memory": memory}}}]}}


def kill(cluster: SimulatedCluster, pod: str = POLICY_1, times: int = 1) -> SimulatedCluster:
    for _ in range(times):
        cluster.end(pod, 137, reason="OOMKilled").next_attempt_runs()
    return cluster


# --- limits of host memory ---


def test_a_worker_killed_for_its_memory_gets_more_within_the_bound() -> None:
    cluster = running(limit="8Gi", recovery={"maxHostMemory": "10Gi"})
    kill(cluster.end(CONTROLLER, ExitCode.WORKER_LOST, message="policy-1 is gone"))
    assert {pod.memory_limit_bytes for pod in cluster.pods.values()} == {None, 10 * GIB}
    (change,) = cluster.stored.plan_changes
    assert (change.diagnosis.class_name, change.diagnosis.numbers["limit_bytes"]) == ("HostMemory", 8 * GIB)
    assert change.phase == "update"


TO_WRITE = "recovery.maxHostMemory is absent, so the limit of 8.00 GiB stays: write 12Gi"
NO_LIMIT = "the policy's container has no memory limit"
"""Its node ran out of memory: a larger limit in the plan would change nothing."""


@pytest.mark.parametrize(
    ("limit", "recovery", "message"),
    [("8Gi", {"maxRestarts": 1}, TO_WRITE), ("", {"maxRestarts": 1, "maxHostMemory": "512Gi"}, NO_LIMIT)],
)
def test_a_limit_that_stays_is_explained(limit: str, recovery: dict[str, Any], message: str) -> None:
    cluster = kill(running(limit=limit, recovery=recovery), times=2)
    cluster.expect(failed="RestartsExhausted", failed_contains=message, plan_changes=[])


def test_a_predicted_limit_is_doubled_at_most_over_all_attempts() -> None:
    cluster = running(**PREDICTED, recovery={"maxRestarts": 1})
    predicted = cluster.pods[POLICY_1].memory_limit_bytes
    assert predicted is not None
    limits = [kill(cluster).pods[POLICY_1].memory_limit_bytes for _ in range(3)]
    assert limits == [predicted * 3 // 2, 2 * predicted, 2 * predicted]
    kill(cluster).expect(failed_contains="recovery.maxHostMemory is absent")


def test_a_limit_below_the_prediction_is_a_condition_and_no_refusal() -> None:
    cluster = running(limit="8Gi", **PREDICTED).expect(memory_pressure=(False, "LimitBelowPrediction"))
    cluster.expect(memory_pressure_contains=("in spec.policy.template", "found 8.00 GiB"))


# --- larger limits of running pods, before the kernel kills ---


def filling(
    cluster: SimulatedCluster, step: int, limit_bytes: int, steps_left: int = 2, after: float = 20, **place: Any
) -> SimulatedCluster:
    """After so many seconds, the trainer warns that the container, which has this limit, is about to reach it."""
    numbers = {"limit_bytes": limit_bytes, "room_bytes": GIB}
    diagnosis = {"class": "HostMemory", "confidence": 0.75, "message": "it grows", "numbers": numbers}
    pressure = {"diagnosis": diagnosis, "role": "policy", "rank": 1, "stepsLeft": steps_left} | place
    return cluster.tick(after).reports(step, memory_pressure=pressure)


def limits(cluster: SimulatedCluster) -> dict[str, int | None]:
    return {name: pod.memory_limit_bytes for name, pod in cluster.pods.items()}


def test_running_pods_get_more_memory_within_the_bound() -> None:
    cluster = running(limit="8Gi", recovery={"maxHostMemory": "16Gi"})
    before = {name: pod.uid for name, pod in cluster.pods.items()}
    recorded = filling(cluster, 4, 8 * GIB).round()
    assert recorded.resize_pods == (), "the status comes first"
    assert cluster.plan.host_memory_bytes == 12 * GIB
    cluster.settle()
    assert limits(cluster) == {CONTROLLER: None, POLICY_0: 12 * GIB, POLICY_1: 12 * GIB}
    filling(cluster, 5, 8 * GIB).settle()
    assert cluster.plan.host_memory_bytes == 12 * GIB, "the report is older than the new limit"
    filling(cluster, 6, 12 * GIB).settle()
    filling(cluster, 7, 16 * GIB).settle()
    assert limits(cluster)[POLICY_1] == 16 * GIB, "no more than the bound"
    assert {name: pod.uid for name, pod in cluster.pods.items()} == before
    cluster.expect(number=1, adjustments=0, plan_changes=[], phase="Running")
    assert cluster.events.count("PlanChanged") == 2
    kill(cluster.end(CONTROLLER, ExitCode.WORKER_LOST, message="policy-1 is gone"))
    assert limits(cluster)[POLICY_1] == 16 * GIB, "new pods have it, too"


def test_a_larger_limit_does_not_wait_for_the_next_report_of_progress() -> None:
    cluster = running(limit="8Gi", recovery={"maxHostMemory": "64Gi"})
    filling(cluster, 4, 8 * GIB).settle()
    filling(cluster, 4, 12 * GIB, after=1).settle()
    assert limits(cluster)[POLICY_1] == 18 * GIB


@pytest.mark.parametrize(
    ("spec", "warning"),
    [
        ({"recovery": {"maxHostMemory": "16Gi"}}, {"steps_left": 20}),
        ({"recovery": {"maxHostMemory": "8Gi"}}, {}),
        ({"recovery": {}}, {}),
        ({"recovery": {"maxHostMemory": "16Gi"}, "memory": {"mode": "Disabled"}}, {}),
        ({"recovery": {"maxHostMemory": "16Gi"}}, {"role": "controller", "rank": 0}),
    ],
)
def test_a_limit_is_not_raised_early_beyond_the_bound_or_where_there_is_none(
    spec: dict[str, Any], warning: dict[str, Any]
) -> None:
    cluster = running(limit="8Gi", **spec)
    filling(cluster, 4, 8 * GIB, **warning).settled(memory_pressure=True)
    assert limits(cluster) == {CONTROLLER: None, POLICY_0: 8 * GIB, POLICY_1: 8 * GIB}


def test_a_limit_never_exceeds_the_allocatable_memory_of_its_node() -> None:
    nodes = tuple(replace(node, host_memory_bytes=10 * GIB) for node in (CPU_NODE, GPU_NODE))
    cluster = running(limit="8Gi", recovery={"maxHostMemory": "16Gi"}, nodes=nodes)
    filling(cluster, 4, 8 * GIB).settle()
    assert limits(cluster)[POLICY_1] == 10 * GIB


def test_the_plan_of_the_trainer_keeps_the_raised_limit() -> None:
    cluster = running(limit="8Gi", recovery={"maxHostMemory": "16Gi"})
    filling(cluster, 4, 8 * GIB).settle()
    changed = PLAN.model_copy(update={"generation": 2, "micro_batch_tokens": 2048})
    cluster.tick(20).reports(5, plan=changed, plan_changes=[trainers_change(cluster)]).settle()
    assert (cluster.plan.generation, cluster.plan.host_memory_bytes) == (2, 12 * GIB)
    assert limits(cluster)[POLICY_1] == 12 * GIB


def test_a_node_without_room_is_in_the_condition() -> None:
    cluster = running(limit="8Gi", recovery={"maxHostMemory": "16Gi"})
    filling(cluster, 4, 8 * GIB).settle()
    cluster.change_pod(POLICY_1, resize_pending="Node didn't have enough resource: memory")
    cluster.tick(20).settled(memory_pressure_contains=f"limit of pod {POLICY_1}: Node didn't have enough resource")


def test_a_lost_rollout_pod_is_replaced_with_the_raised_limit() -> None:
    cluster = running(**disaggregated())
    filling(cluster, 4, 8 * GIB, role="rollout", rank=0).settle()
    assert limits(cluster)[ROLLOUT_1] == 12 * GIB
    cluster.change_pod(ROLLOUT_1, disruption="EvictionByEvictionAPI", deleting=True).settle()
    cluster.finish_deletions().settled(number=1, pod_replacements=1)
    assert limits(cluster)[ROLLOUT_1] == 12 * GIB


# --- shared memory ---


@pytest.mark.parametrize(
    ("size", "limit", "found"),
    [
        ("", "", ""),
        ("600Mi", "", "found 480 MiB in /dev/shm"),
        # The kubelet makes /dev/shm no larger than the pod's memory: a larger sizeLimit would change nothing.
        ("", "720Mi", "found 576 MiB in /dev/shm"),
    ],
)
def test_a_dev_shm_that_is_too_small_grows(size: str, limit: str, found: str) -> None:
    template = limited(limit) if limit else {"spec": {}}
    if size:
        template["spec"]["volumes"] = [{"name": "shm", "emptyDir": {"sizeLimit": size}}]
    recovery = {"maxHostMemory": "4Gi", "maxSharedMemory": "64Gi"}
    cluster = running(policy={"replicas": 2, "template": template}, recovery=recovery)
    before = cluster.pods[POLICY_0]
    reported = evidence(cluster, rank=1, phase=None, message=found) if found else None
    cluster.end(CONTROLLER, ExitCode.SHARED_MEMORY_EXHAUSTED, message="too small", step=3, evidence=reported)
    after = cluster.next_attempt_runs().pods[POLICY_0]
    if limit:
        assert after.memory_limit_bytes == 4 << 30, "the prediction, up to the bound"
    else:
        assert before.shared_memory_bytes is not None
        assert after.shared_memory_bytes == 2 * before.shared_memory_bytes
    assert cluster.stored.plan_changes[-1].diagnosis.class_name == "SharedMemory"


# --- whose memory ran out ---

COLOCATED = {"policy": {"replicas": 2, "gpusPerReplica": 8}}


def disaggregated(policy_gpus: int = 8, **rollout: Any) -> dict[str, Any]:
    return {
        "topology": "Disaggregated",
        "policy": {"replicas": 2, "gpusPerReplica": policy_gpus, "template": limited("16Gi")},
        "rollout": {"replicas": 2, "template": limited("8Gi"), **rollout},
        "recovery": {"maxHostMemory": "64Gi"},
    }


@pytest.mark.parametrize(
    ("pod", "job", "rank"),
    [
        (ROLLOUT_1, disaggregated(), 1),
        (ROLLOUT_1, disaggregated(gpusPerReplica=4), 4),
        (ROLLOUT_0, disaggregated(gpusPerReplica=4), 0),
        (POLICY_1, disaggregated(gpusPerReplica=4), 8),
        (ROLLOUT_1, disaggregated(gpusPerReplica=4, tensorParallelSize=2), 4),
        (ROLLOUT_1, disaggregated(0, gpusPerReplica=0, tensorParallelSize=1), 1),
        (ROLLOUT_1, disaggregated(0, gpusPerReplica=0, tensorParallelSize=2), 2),
    ],
)
def test_a_pod_killed_for_its_memory_stands_for_the_first_process_in_it(
    pod: str, job: dict[str, Any], rank: int
) -> None:
    (change,) = running(**job).end(pod, 137, reason="OOMKilled").settled().stored.plan_changes
    assert (change.role, change.rank, change.diagnosis.class_name) == (pod.split("-")[1], rank, "HostMemory")


def test_the_limit_of_the_pod_that_the_engine_is_in_is_raised() -> None:
    message = "MemoryError: Unable to allocate 1.00 GiB for an array"
    cluster = running(**disaggregated(gpusPerReplica=4))
    run_out(cluster, code=ExitCode.HOST_OUT_OF_MEMORY, role="rollout", rank=7, message=message).settle()
    (change,) = cluster.stored.plan_changes
    assert (change.remedy.setting, change.remedy.after) == ("hostMemory", "12Gi")


@pytest.mark.parametrize("spec", [COLOCATED, disaggregated(gpusPerReplica=4), disaggregated(gpusPerReplica=2)])
def test_every_pod_is_where_its_first_rank_is(spec: dict[str, Any]) -> None:
    cluster = running(**spec)
    layout = PodLayout.of(RLJobSpec.model_validate(job_spec(**spec)))
    for pod in cluster.pods.values():
        assert layout.pod_of(pod.role, layout.first_rank(pod.role, pod.index)) == (pod.role, pod.index)


@pytest.mark.parametrize(
    ("spec", "pods"),
    [
        ({}, {7: 0, 8: 1, 15: 1}),
        ({"rollout": {"tensorParallelSize": 4}}, {7: 0, 8: 1}),  # a process for each GPU
        ({"rollout": {"tensorParallelSize": 4}, "trainer": {"image": "a"}}, {1: 0, 2: 1}),
    ],
)
def test_a_colocated_engine_is_in_the_pod_of_its_policy_rank(spec: dict[str, Any], pods: dict[int, int]) -> None:
    layout = PodLayout.of(RLJobSpec.model_validate(job_spec(**COLOCATED, **spec)))
    assert {rank: layout.pod_of("rollout", rank) for rank in pods} == {rank: ("policy", pods[rank]) for rank in pods}


# --- another trainer: its probe or the kernel reports; its pods or a supported setting changes ---

DEVICE, HOST = ExitCode.DEVICE_OUT_OF_MEMORY, ExitCode.HOST_OUT_OF_MEMORY
SPIKE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 6.00 GiB. GPU 0 has a total capacity of 79.10 GiB "
    "of which 1.00 GiB is free. Of the allocated memory 77.00 GiB is allocated by PyTorch, and 512.00 MiB is reserved "
    "by PyTorch but unallocated."
)
NUMPY = "MemoryError: Unable to allocate 4.00 GiB for an array"
ALLOCATOR = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
    "to allocate 536870912 bytes. Error code 12 (Cannot allocate memory)"
)
ADAPTER: dict[str, Any] = {"trainer": {"adapter": "TRL"}}
BOUND: dict[str, Any] = {"recovery": {"maxHostMemory": "4Gi"}}


def other_trainer(gpus: int = 1, trainer: dict[str, Any] | None = None, **spec: Any) -> SimulatedCluster:
    policy = {"replicas": 2 if gpus else 1, "gpusPerReplica": gpus, "template": limited("1Gi")}
    return running_job(trainer={"image": "registry.example/trl:1"} | (trainer or {}), policy=policy, **spec)


def run_out_of(cluster: SimulatedCluster, failure: tuple[int, str] | None) -> SimulatedCluster:
    """`failure`: exit code and error that the probe reports, or None for a kill by the kernel."""
    if not failure:
        return cluster.end(POLICY_0, 137, reason="OOMKilled")
    code, message = failure
    found = evidence(cluster, rank=0, step=7, message=message)
    return cluster.end(POLICY_0, 1, message="out of memory", message_code=code, evidence=found)


@pytest.mark.parametrize(
    ("gpus", "spec", "failure", "setting", "diagnosed"),
    [
        (1, BOUND, None, "hostMemory", "HostMemory"),
        (1, {}, (DEVICE, FRAGMENTED), "expandableSegments", "Fragmentation"),
        (1, {"trainer": {"adapter": "TRL", "supportedSettings": []}}, (DEVICE, SPIKE), "microBatchTokens", ""),
        (0, ADAPTER, None, "microBatchTokens", "HostMemory"),
        (0, ADAPTER, (HOST, ALLOCATOR), "microBatchTokens", "HostMemory"),
        (0, ADAPTER | BOUND, None, "hostMemory", "HostMemory"),
    ],
)
def test_the_remedy_for_another_trainer(
    gpus: int, spec: dict[str, Any], failure: tuple[int, str] | None, setting: str, diagnosed: str
) -> None:
    cluster = other_trainer(gpus, **spec)
    before = cluster.expect(plan_generation=1).plan  # it has one from its first attempt on
    run_out_of(cluster, failure).settled(adjustments=1, restarts=0)
    first = cluster.stored.attempts[0]
    assert first.diagnosis is not None
    assert diagnosed in ("", first.diagnosis.class_name)
    assert cluster.remedies == [setting]
    if setting == "microBatchTokens":
        assert cluster.plan.micro_batch_tokens == before.micro_batch_tokens // 2
    if setting == "hostMemory":
        assert GIB < (cluster.plan.host_memory_bytes or 0) <= 4 * GIB
    cluster.next_attempt_runs().expect(phase="Running", number=2)


@pytest.mark.parametrize(
    ("gpus", "spec", "failure", "message"),
    [
        (1, {"recovery": {"maxAdjustments": 0}}, (HOST, NUMPY), "4.00 GiB more did not fit"),
        (0, {}, None, "microBatchTokens"),
        (1, ADAPTER, None, "out of host memory"),
        (1, {"trainer": {"supportedSettings": []}}, (DEVICE, FRAGMENTED), "6.10 GiB"),
    ],
)
def test_a_job_of_another_trainer_without_a_remedy_is_explained(
    gpus: int, spec: dict[str, Any], failure: tuple[int, str] | None, message: str
) -> None:
    cluster = other_trainer(gpus, **spec | {"recovery": {"maxRestarts": 0} | spec.get("recovery", {})})
    run_out_of(cluster, failure).settled(failed=True, failed_contains=message, plan_changes=[])


@pytest.mark.parametrize("code", [DEVICE, HOST])
def test_an_outlived_memory_message_does_not_fail_a_complete_job(code: ExitCode) -> None:
    cluster = other_trainer()
    cluster.end(POLICY_0, 0, message="out of memory", message_code=code, evidence=evidence(cluster, rank=0))
    cluster.end(POLICY_1, 0).settled(phase="Complete", failed=False)
