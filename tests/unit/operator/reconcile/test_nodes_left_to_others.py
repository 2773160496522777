"""If a foreign process holds the GPU, the job moves to another node that has room for the pod."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rljob_api.conditions import ConditionType
from rljob_api.exit_codes import ExitCode
from rljob_api.step_report import Evidence
from rljob_operator.reconcile.observed import ObservedNode
from rljob_testing.simulated_cluster import (
    CONTROLLER,
    CPU_NODE,
    GPU_NODE,
    SimulatedCluster,
    job_spec,
)
from tests.unit.operator.reconcile.memory_failures import evidence, running, status_of

STRANGER = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.77 GiB. GPU 0 has a total capacity of 139.80 GiB "
    "of which 999.50 MiB is free. Including non-PyTorch memory, this process has 40.44 GiB memory in use. Process 3640 "
    "has 98.37 GiB memory in use. Of the allocated memory 39.87 GiB is allocated by PyTorch, and 896.00 KiB is "
    "reserved by PyTorch but unallocated."
)
ENGINE_SLEEPS = {
    "trainer": {"image": "registry.example/trl:1", "supportedSettings": ["rolloutSleep"]},
    "memory": {"rolloutSleep": "Level1"},
}
EIGHT_GPUS = replace(GPU_NODE, name="eight-gpus")
FOUR_GPUS = ObservedNode("four-gpus", gpus=4, usable=True)
WORKER = "demo-policy-0"


def held_by_foreign_processes(
    times: int, nodes: tuple[ObservedNode, ...], on: str = "gpu-node", **spec: Any
) -> SimulatedCluster:
    """A job of another trainer, whose pod ran out of memory `times` times, on node `on` each time."""
    given = {"policy": {"replicas": 1, "gpusPerReplica": 1}, **ENGINE_SLEEPS, **spec}
    cluster = SimulatedCluster(spec=job_spec(**given), nodes=nodes)
    for attempt in range(1, times + 1):
        for _ in range(4):
            cluster.settle()
            cluster.finish_deletions()
        cluster.tick(400)
        cluster.settle()
        cluster.place(WORKER, node=on)
        cluster.start()
        cluster.ready()
        cluster.settle()
        words = {"time": cluster.now, "attempt": attempt, "role": "policy", "rank": 0, "step": 1, "message": STRANGER}
        reported = Evidence.model_validate(words)
        cluster.end(WORKER, 1, sentence="ran out", message_code=ExitCode.DEVICE_OUT_OF_MEMORY, evidence=reported)
    cluster.settle()
    return cluster


def excluded(cluster: SimulatedCluster) -> list[str]:
    plan = status_of(cluster).plan
    assert plan is not None
    return plan.excluded_nodes


def settings(cluster: SimulatedCluster) -> list[str]:
    return [change.remedy.setting for change in status_of(cluster).plan_changes]


def test_fresh_processes_first_and_then_the_node_is_left() -> None:
    cluster = held_by_foreign_processes(2, (CPU_NODE, GPU_NODE, FOUR_GPUS))
    assert settings(cluster) == ["processes", "excludedNodes"]
    assert excluded(cluster) == ["gpu-node"]
    assert cluster.condition(ConditionType.RECOVERING).message.endswith("(adjustment 2 of 6)")


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
def test_a_node_is_left_only_where_another_one_takes_the_pod(gpus: int, other: ObservedNode, left: bool) -> None:
    cluster = held_by_foreign_processes(2, (GPU_NODE, other), policy={"replicas": 1, "gpusPerReplica": gpus})
    assert excluded(cluster) == (["gpu-node"] if left else [])


def test_where_no_other_node_is_left_the_job_says_so_in_the_end() -> None:
    cluster = held_by_foreign_processes(3, (CPU_NODE, GPU_NODE), recovery={"maxRestarts": 1})
    failed = cluster.condition(ConditionType.FAILED)
    assert failed.reason == "RestartsExhausted"
    assert "98.38 GiB of the GPU's 139.80 GiB were held by other processes" in failed.message
    assert (
        "Tried: generation 2 (step 1, startup, ForeignProcess): restarting processes, the memory plan is unchanged"
        in failed.message
    )
    assert "To continue: no other node is known to have room: stop the other process on its node" in failed.message


@pytest.mark.parametrize(
    ("spec", "others", "left"),
    [
        ({"policy": {"replicas": 2, "gpusPerReplica": 8}}, (EIGHT_GPUS,), False),
        ({"policy": {"replicas": 2, "gpusPerReplica": 8}}, (EIGHT_GPUS, replace(EIGHT_GPUS, name="third")), True),
        ({"policy": {"replicas": 2, "gpusPerReplica": 4}}, (EIGHT_GPUS,), True),
        ({"rollout": {"gpusPerReplica": 4}, "policy": {"gpusPerReplica": 8}}, (FOUR_GPUS,), False),
        ({"rollout": {"gpusPerReplica": 4}, "policy": {"gpusPerReplica": 8}}, (FOUR_GPUS, EIGHT_GPUS), True),
        ({"rollout": {"replicas": 2, "gpusPerReplica": 4}, "policy": {"gpusPerReplica": 4}}, (EIGHT_GPUS,), False),
    ],
)
def test_a_node_is_left_only_where_all_workers_find_room_without_it(
    spec: dict[str, Any], others: tuple[ObservedNode, ...], left: bool
) -> None:
    topology = "Disaggregated" if "rollout" in spec else "Colocated"
    cluster = running(topology=topology, **spec)
    cluster.nodes = (CPU_NODE, GPU_NODE, *others)
    foreign = {"class": "ForeignProcess", "confidence": 0.8, "message": "98.38 GiB were held by other processes"}
    for attempt in (1, 2):
        reported = evidence(cluster, attempt=attempt, rank=0, diagnoses=[foreign])
        cluster.end(CONTROLLER, ExitCode.DEVICE_OUT_OF_MEMORY, sentence="ran out", step=3, evidence=reported)
        cluster.next_attempt_runs()
    assert excluded(cluster) == (["gpu-node"] if left else [])


def test_an_unsupported_setting_is_no_evidence_about_the_engine() -> None:
    trainer = {"image": "registry.example/trl:1", "supportedSettings": []}
    cluster = held_by_foreign_processes(1, (CPU_NODE, GPU_NODE), trainer=trainer, memory={})
    last = status_of(cluster).last_out_of_memory
    assert last is not None
    assert "the plan lets the engine stay awake" not in last.diagnosis.message
    assert settings(cluster) == ["processes"]
