"""Whose memory ran out: the rank of a pod that could not say, and the pod of a rank that did."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_api.job import RLJobSpec
from rljob_operator.objects.pod_layout import PodLayout
from rljob_testing.simulated_cluster import CONTROLLER, POLICY_1, SimulatedCluster, job_spec
from tests.unit.operator.reconcile.memory_failures import evidence, running, status_of

ROLLOUT_0, ROLLOUT_1 = "demo-rollout-0", "demo-rollout-1"
COLOCATED = {"policy": {"replicas": 2, "gpusPerReplica": 8}}


def limited(memory: str) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "rljob", "resources": {"limits": {"memory": memory}}}]}}


def disaggregated(**rollout: Any) -> dict[str, Any]:
    return {
        "topology": "Disaggregated",
        "policy": {"replicas": 2, "gpusPerReplica": 8, "template": limited("16Gi")},
        "rollout": {"replicas": 2, "template": limited("8Gi"), **rollout},
        "recovery": {"maxHostMemory": "64Gi"},
    }


def job(**rollout: Any) -> SimulatedCluster:
    return running(**disaggregated(**rollout))


@pytest.mark.parametrize(
    ("pod", "rollout", "rank"),
    [
        (ROLLOUT_1, {}, 1),
        (ROLLOUT_1, {"gpusPerReplica": 4}, 4),
        (ROLLOUT_0, {"gpusPerReplica": 4}, 0),
        (POLICY_1, {"gpusPerReplica": 4}, 8),
        (ROLLOUT_1, {"gpusPerReplica": 4, "tensorParallelSize": 2}, 4),
    ],
)
def test_a_pod_killed_for_its_memory_stands_for_the_first_process_in_it(
    pod: str, rollout: dict[str, Any], rank: int
) -> None:
    cluster = job(**rollout)
    cluster.end(pod, 137, reason="OOMKilled")
    cluster.settle()
    (change,) = status_of(cluster).plan_changes
    assert (change.role, change.rank) == (pod.split("-")[1], rank)
    assert change.diagnosis.class_name == "HostMemory"


@pytest.mark.parametrize("processes", [1, 2])
def test_a_rollout_pod_without_gpus_holds_one_engine(processes: int) -> None:
    spec = disaggregated(gpusPerReplica=0, tensorParallelSize=processes)
    cluster = running(**spec | {"policy": {"replicas": 2, "gpusPerReplica": 0}})
    cluster.end(ROLLOUT_1, ExitCode.HOST_OUT_OF_MEMORY)
    cluster.settle()
    (change,) = status_of(cluster).plan_changes
    assert (change.role, change.rank) == ("rollout", processes)


def test_the_limit_of_the_pod_that_the_engine_is_in_is_raised() -> None:
    cluster = job(gpusPerReplica=4)
    words = evidence(cluster, role="rollout", rank=7, message="MemoryError: Unable to allocate 1.00 GiB for an array")
    cluster.end(CONTROLLER, ExitCode.HOST_OUT_OF_MEMORY, sentence="engine 7 ran out", step=3, evidence=words)
    cluster.settle()
    (change,) = status_of(cluster).plan_changes
    assert (change.remedy.setting, change.remedy.after) == ("hostMemory", "12Gi")


@pytest.mark.parametrize("spec", [COLOCATED, disaggregated(gpusPerReplica=4), disaggregated(gpusPerReplica=2)])
def test_every_pod_is_where_its_first_rank_is(spec: dict[str, Any]) -> None:
    cluster = running(**spec)
    layout = PodLayout.of(RLJobSpec.model_validate(job_spec(**spec)))
    for pod in cluster.pods.values():
        assert layout.pod_of(pod.role, layout.first_rank(pod.role, pod.index)) == (pod.role, pod.index)


def test_a_colocated_engine_is_in_the_pod_of_its_policy_rank() -> None:
    layout = PodLayout.of(RLJobSpec.model_validate(job_spec(**COLOCATED)))
    assert [layout.pod_of("rollout", rank) for rank in (7, 8, 15)] == [("policy", 0), ("policy", 1), ("policy", 1)]
    own = PodLayout.of(RLJobSpec.model_validate(job_spec(**COLOCATED, rollout={"tensorParallelSize": 4})))
    assert [own.pod_of("rollout", rank) for rank in (7, 8)] == [("policy", 0), ("policy", 1)], "a process for each GPU"
    shared = PodLayout.of(
        RLJobSpec.model_validate(job_spec(**COLOCATED, rollout={"tensorParallelSize": 4}, trainer={"image": "a"}))
    )
    assert [shared.pod_of("rollout", rank) for rank in (1, 2)] == [("policy", 0), ("policy", 1)]
