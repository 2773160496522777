"""Placement of a job's pods: nodes with GPUs, and Kueue and Volcano with their published CRDs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import yaml

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_cluster.control_plane import ControlPlane
from rljob_operator.labels import NODE_HAS_GPUS
from rljob_operator.names import object_name
from rljob_operator.objects.placement import ADMISSION_GATE, QUEUE_LABEL
from rljob_operator.observe.observer import VOLCANO_GROUP
from rljob_testing.operator import manifests
from rljob_testing.operator.api_client import ResourceClient
from rljob_testing.operator.fault_proxy import FaultProxy
from rljob_testing.operator.installation import KUEUE, VOLCANO, ModuleUnavailable, module_files
from rljob_testing.operator.operator_process import OperatorProcess, restart
from rljob_testing.operator.simulated_kubelet import CPU_NODE, GPU_NODE, SimulatedKubelet
from rljob_testing.operator.watched_job import WatchedJob
from rljob_testing.patience import eventually, holds_for
from tests.integration.operator.conftest import NewJob, RestartedWith, run_kubectl


def label(api: ResourceClient, node: str) -> str | None:
    labels: dict[str, str] = api.get("nodes", node)["metadata"].get("labels", {})
    return labels.get(NODE_HAS_GPUS)


@contextmanager
def gpus_everywhere(api: ResourceClient, kubelet: SimulatedKubelet) -> Iterator[None]:
    """All nodes have GPUs within the block. Waits until the operator has observed each change."""
    kubelet.set_gpus(CPU_NODE, 2)
    try:
        eventually(lambda: label(api, CPU_NODE) == "true", "the label on the node that has GPUs now")
        yield
    finally:
        kubelet.set_gpus(CPU_NODE, 0)
    eventually(lambda: label(api, CPU_NODE) is None, "no label on a node that has lost its GPUs")


def test_the_label_follows_gpus_and_heartbeats_cost_no_write(
    operator: OperatorProcess, api: ResourceClient, kubelet: SimulatedKubelet, proxy: FaultProxy
) -> None:
    eventually(lambda: label(api, GPU_NODE) == "true", "the label on the node with GPUs")
    assert label(api, CPU_NODE) is None
    with gpus_everywhere(api, kubelet):
        assert label(api, GPU_NODE) == "true"
    proxy.wait_until_quiet()
    before = len(proxy.writes(namespace=""))
    for second in range(3):
        kubelet.set_gpus(GPU_NODE, 8)
        condition = {"type": "Ready", "status": "True", "lastHeartbeatTime": f"2026-01-01T00:00:0{second}Z"}
        api.patch_status("nodes", GPU_NODE, {"conditions": [condition]})
    holds_for(1.0, lambda: len(proxy.writes(namespace="")) == before, "no write of the operator")


def test_the_controller_uses_a_gpu_node_if_no_other_exists_and_it_may(
    job: WatchedJob, new_job: NewJob, api: ResourceClient, kubelet: SimulatedKubelet
) -> None:
    waiting = new_job()
    with gpus_everywhere(api, kubelet):
        job.create().run()
        scheduled = job.wait_for(ConditionType.SCHEDULED)
        assert scheduled["reason"] == ConditionReason.CONTROLLER_ON_GPU_NODE
        environment = {e["name"]: e.get("value", "") for e in job.controller_pod()["spec"]["containers"][0]["env"]}
        assert (environment["CUDA_VISIBLE_DEVICES"], environment["NVIDIA_VISIBLE_DEVICES"]) == ("", "void")
        waiting.create(controller={"requireGpuFreeNode": True})
        waiting.wait_for(ConditionType.SCHEDULED, "False", ConditionReason.NO_GPU_FREE_NODE)
        holds_for(0.5, lambda: not waiting.pods, "no pods yet")
    waiting.run()


# --- queues and gangs ---

Install = Callable[[tuple[str, str]], None]


@pytest.fixture
def installed(control_plane: ControlPlane, api: ResourceClient, job: WatchedJob, operator: OperatorProcess) -> Install:
    """Serves a project's CRDs for the rest of the session, to an operator that starts with them."""

    def install(project: tuple[str, str]) -> None:
        try:
            files = module_files(*project)
        except ModuleUnavailable as error:
            pytest.skip(f"no CRDs of {project[0]} here: {error}")
        for file in files:
            run_kubectl(control_plane, "apply", "--server-side", "-f", str(file))
        control_plane.wait_established()
        groups = {yaml.safe_load(file.read_text())["spec"]["group"] for file in files}
        eventually(lambda: groups <= served_groups(api), "the groups of the CRDs to be served")
        restart(operator, api)

    return install


def test_a_queued_job_is_a_pod_group_that_waits_at_kueues_gate(
    job: WatchedJob,
    kubelet: SimulatedKubelet,
    api: ResourceClient,
    namespace: str,
    installed: Install,
    restarted_with: RestartedWith,
) -> None:
    installed(KUEUE)
    kubelet.follow(namespace)
    job.create(queueName="gpus", policy={"replicas": 2})
    pods = job.wait_for_pods(3)
    groups = {pod["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"] for pod in pods.values()}
    assert len(groups) == 1
    for pod in pods.values():
        assert pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
        assert pod["metadata"]["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "3"
        assert pod["spec"]["schedulingGates"] == [{"name": "kueue.x-k8s.io/admission"}]
    job.wait_for(ConditionType.SCHEDULED, "False")
    with restarted_with(placement_timeout_seconds=2):
        holds_for(3.0, lambda: len(job.pods) == 3, "a job in a queue waits longer than for placement")
    for name in pods:
        api.merge("pods", name, {"spec": {"schedulingGates": []}}, namespace)  # Kueue admits
    job.run()
    job.complete()


def test_the_label_of_kueue_queues_a_job_like_queue_name(
    job: WatchedJob, kubelet: SimulatedKubelet, api: ResourceClient, namespace: str, installed: Install
) -> None:
    installed(KUEUE)
    kubelet.follow(namespace)
    manifest = manifests.job("job")
    manifest["metadata"]["labels"] = {QUEUE_LABEL: "gpus"}
    api.create("rljobs", manifest, namespace)
    for name, pod in job.wait_for_pods(2).items():
        assert pod["metadata"]["labels"][QUEUE_LABEL] == "gpus"
        assert pod["spec"]["schedulingGates"] == [{"name": ADMISSION_GATE}]
        api.merge("pods", name, {"spec": {"schedulingGates": []}}, namespace)  # Kueue admits
    job.run()
    job.complete()


def test_volcano_gets_a_pod_group_unless_the_job_names_another_gang(
    job: WatchedJob, new_job: NewJob, api: ResourceClient, namespace: str, installed: Install
) -> None:
    installed(VOLCANO)
    job.create(policy={"replicas": 2})
    pods = job.wait_for_pods(3)
    group = api.get("podgroups", object_name("job"), namespace)
    assert group["spec"]["minMember"] == 3
    assert group["spec"]["minResources"]["nvidia.com/gpu"] == "2"
    assert group["metadata"]["ownerReferences"][0]["kind"] == "RLJob"
    for pod in pods.values():
        assert pod["spec"]["schedulerName"] == "volcano"
        assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == group["metadata"]["name"]
    job.run()
    native = new_job().create(gang="Native")
    pods = native.wait_for_pods(2)
    assert {pod["spec"]["schedulerName"] for pod in pods.values()} == {"default-scheduler"}
    assert api.list("podgroups", native.namespace) == []


def test_a_job_reports_that_volcano_is_missing(
    job: WatchedJob, api: ResourceClient, operator: OperatorProcess, namespace: str
) -> None:
    for crd in volcano_crds(api):
        api.delete("customresourcedefinitions", crd)
    eventually(lambda: not volcano_crds(api) and VOLCANO_GROUP not in served_groups(api), "no Volcano")
    restart(operator, api)
    job.create(gang="Volcano")
    waiting = job.wait_for(ConditionType.SCHEDULED, "False")
    eventually(lambda: "Volcano" in job.condition(ConditionType.SCHEDULED)["message"], "a message about Volcano")
    assert waiting["status"] == "False"
    assert not job.pods


def volcano_crds(api: ResourceClient) -> list[str]:
    crds = api.list("customresourcedefinitions")
    return [crd["metadata"]["name"] for crd in crds if crd["spec"]["group"] == VOLCANO_GROUP]


def served_groups(api: ResourceClient) -> set[str]:
    """API groups that the server offers, which is a moment after their CRDs are established. The operator reads them
    when it starts."""
    return {group["name"] for group in api.request("GET", "/apis")["groups"]}
