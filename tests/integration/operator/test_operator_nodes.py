"""The label that the operator keeps on nodes with GPUs, and where the controller goes by it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_operator.labels import NODE_HAS_GPUS
from rljob_testing.operator.api_client import ApiClient
from rljob_testing.operator.eventually import eventually, holds_for
from rljob_testing.operator.fault_proxy import FaultProxy
from rljob_testing.operator.operator_process import OperatorProcess
from rljob_testing.operator.simulated_kubelet import CPU_NODE, GPU_NODE, SimulatedKubelet
from rljob_testing.operator.watched_job import WatchedJob


def label(api: ApiClient, node: str) -> str | None:
    labels: dict[str, str] = api.get("nodes", node)["metadata"].get("labels", {})
    return labels.get(NODE_HAS_GPUS)


@contextmanager
def gpus_everywhere(api: ApiClient, kubelet: SimulatedKubelet) -> Iterator[None]:
    """Within, no node is without GPUs. The operator knows when that begins, and when it is over."""
    kubelet.set_gpus(CPU_NODE, 2)
    try:
        eventually(lambda: label(api, CPU_NODE) == "true", "the label on the node that has GPUs now")
        yield
    finally:
        kubelet.set_gpus(CPU_NODE, 0)
    eventually(lambda: label(api, CPU_NODE) is None, "no label on a node that has lost its GPUs")


def test_the_label_follows_gpus_as_they_come_and_go(
    operator: OperatorProcess, api: ApiClient, kubelet: SimulatedKubelet
) -> None:
    eventually(lambda: label(api, GPU_NODE) == "true", "the label on the node with GPUs")
    assert label(api, CPU_NODE) is None
    with gpus_everywhere(api, kubelet):
        assert label(api, GPU_NODE) == "true"


def test_heartbeats_of_nodes_cost_no_write(
    operator: OperatorProcess, api: ApiClient, kubelet: SimulatedKubelet, proxy: FaultProxy
) -> None:
    proxy.wait_until_quiet()
    before = len(proxy.writes(namespace=""))
    for second in range(3):
        kubelet.set_gpus(GPU_NODE, 8)
        condition = {"type": "Ready", "status": "True", "lastHeartbeatTime": f"2026-01-01T00:00:0{second}Z"}
        api.patch_status("nodes", GPU_NODE, {"conditions": [condition]})
    holds_for(1.0, lambda: len(proxy.writes(namespace="")) == before, "no write of the operator")


def test_with_only_gpu_nodes_the_controller_runs_there_and_the_job_says_so(
    job: WatchedJob, api: ApiClient, kubelet: SimulatedKubelet
) -> None:
    with gpus_everywhere(api, kubelet):
        job.create().run()
        scheduled = job.wait_for(ConditionType.SCHEDULED)
        assert scheduled["reason"] == ConditionReason.CONTROLLER_ON_GPU_NODE
        environment = {e["name"]: e.get("value", "") for e in job.controller_pod()["spec"]["containers"][0]["env"]}
        assert (environment["CUDA_VISIBLE_DEVICES"], environment["NVIDIA_VISIBLE_DEVICES"]) == ("", "void")


def test_a_job_that_requires_a_gpu_free_node_waits_for_one(
    job: WatchedJob, api: ApiClient, kubelet: SimulatedKubelet
) -> None:
    with gpus_everywhere(api, kubelet):
        job.create(controller={"requireGpuFreeNode": True})
        job.wait_for(ConditionType.SCHEDULED, "False", ConditionReason.NO_GPU_FREE_NODE)
        holds_for(0.5, lambda: not job.pods, "no pods yet")
    job.run()
