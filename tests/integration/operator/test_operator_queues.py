"""Kueue and Volcano, with the CRDs that their projects publish: what they find of a job."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import yaml

from rljob_api.conditions import ConditionType
from rljob_cluster.control_plane import ControlPlane
from rljob_operator.names import pod_group_name
from rljob_operator.objects.gang_scheduling import ADMISSION_GATE, QUEUE_LABEL
from rljob_operator.observe.observer import VOLCANO_GROUP
from rljob_testing.operator import manifests
from rljob_testing.operator.api_client import ApiClient
from rljob_testing.operator.eventually import eventually, holds_for
from rljob_testing.operator.go_modules import KUEUE, VOLCANO, ModuleUnavailable, module_files
from rljob_testing.operator.operator_process import OperatorProcess
from rljob_testing.operator.restarts import restart
from rljob_testing.operator.simulated_kubelet import SimulatedKubelet
from rljob_testing.operator.watched_job import WatchedJob
from tests.integration.operator.conftest import RestartedWith, run_kubectl

Install = Callable[[tuple[str, str]], None]


@pytest.fixture
def installed(control_plane: ControlPlane, api: ApiClient, job: WatchedJob, operator: OperatorProcess) -> Install:
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
    api: ApiClient,
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
    job: WatchedJob, kubelet: SimulatedKubelet, api: ApiClient, namespace: str, installed: Install
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


def test_a_job_gets_a_pod_group_where_volcano_is(
    job: WatchedJob, api: ApiClient, namespace: str, installed: Install
) -> None:
    installed(VOLCANO)
    job.create(policy={"replicas": 2})
    pods = job.wait_for_pods(3)
    group = api.get("podgroups", pod_group_name("job"), namespace)
    assert group["spec"]["minMember"] == 3
    assert group["spec"]["minResources"]["nvidia.com/gpu"] == "2"
    assert group["metadata"]["ownerReferences"][0]["kind"] == "RLJob"
    for pod in pods.values():
        assert pod["spec"]["schedulerName"] == "volcano"
        assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == group["metadata"]["name"]
    job.run()
    job.complete()


def test_a_job_that_names_its_gang_gets_no_other(
    job: WatchedJob, api: ApiClient, namespace: str, installed: Install
) -> None:
    installed(VOLCANO)
    job.create(gang="Native")
    pods = job.wait_for_pods(2)
    assert {pod["spec"]["schedulerName"] for pod in pods.values()} == {"default-scheduler"}
    assert api.list("podgroups", namespace) == []


def test_volcano_asked_for_and_not_there_is_told(
    job: WatchedJob, api: ApiClient, operator: OperatorProcess, namespace: str
) -> None:
    for crd in volcano_crds(api):
        api.delete("customresourcedefinitions", crd)
    eventually(lambda: not volcano_crds(api) and VOLCANO_GROUP not in served_groups(api), "no Volcano")
    restart(operator, api)
    job.create(gang="Volcano")
    waiting = job.wait_for(ConditionType.SCHEDULED, "False")
    eventually(lambda: "Volcano" in job.condition(ConditionType.SCHEDULED)["message"], "a sentence about Volcano")
    assert waiting["status"] == "False"
    assert not job.pods


def volcano_crds(api: ApiClient) -> list[str]:
    crds = api.list("customresourcedefinitions")
    return [crd["metadata"]["name"] for crd in crds if crd["spec"]["group"] == VOLCANO_GROUP]


def served_groups(api: ApiClient) -> set[str]:
    """The operator reads them once when it starts. They follow the CRDs after a moment."""
    return {group["name"] for group in api.request("GET", "/apis")["groups"]}
