"""Several installations of the operator in one cluster, other managers of jobs, and an operator of a few namespaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rljob_api.conditions import ConditionType
from rljob_cluster.control_plane import ControlPlane
from rljob_operator.labels import OPERATOR
from rljob_testing.operator import manifests
from rljob_testing.operator.api_client import ResourceClient
from rljob_testing.operator.fault_proxy import FaultProxy
from rljob_testing.operator.installation import install
from rljob_testing.operator.operator_process import OPERATOR_NAMESPACE, OperatorProcess, kept_running, write_kubeconfig
from rljob_testing.operator.simulated_kubelet import SimulatedKubelet
from rljob_testing.operator.watched_job import WatchedJob
from rljob_testing.patience import eventually, holds_for
from tests.integration.operator.conftest import SETTINGS

OURS = f"{OPERATOR_NAMESPACE}/rljob-operator"
OTHER_IMAGE = "localhost/rljob/trainer:other"


@pytest.fixture
def other_operator(
    operator: OperatorProcess, operator_kubeconfig: Path, ports: Iterator[int]
) -> Iterator[OperatorProcess]:
    """Another installation in the same cluster, for all namespaces as well."""
    operator.wait_ready()
    different = {"lease_name": "other", "leader_election": False, "trainer_image": OTHER_IMAGE}
    log = operator_kubeconfig.with_name("other.log")
    other = OperatorProcess(operator_kubeconfig, log, next(ports), next(ports), {**SETTINGS, **different})
    other.start()
    yield other
    other.stop()


def wait_for_attempt(job: WatchedJob, number: int) -> None:
    eventually(lambda: job.attempt == number, f"attempt {number}", context=lambda: job.status)


def test_two_operators_share_the_jobs_and_each_job_keeps_its_own(
    other_operator: OperatorProcess, api: ResourceClient, kubelet: SimulatedKubelet, namespace: str
) -> None:
    jobs = [WatchedJob(api, kubelet, namespace, name=f"job-{number}").create() for number in range(4)]
    kubelet.follow(namespace)
    for job in jobs:
        job.wait_for(ConditionType.RUNNING)
        owner = job.object["metadata"]["annotations"][OPERATOR]
        assert owner in (OURS, f"{OPERATOR_NAMESPACE}/other")
        kubelet.end(job.pods[f"{job.name}-controller"], 1)
        wait_for_attempt(job, 2)
        job.wait_for(ConditionType.RUNNING)
        image = job.pods[f"{job.name}-controller"]["spec"]["containers"][0]["image"]
        assert (image == OTHER_IMAGE) == (owner != OURS)
        assert job.object["metadata"]["annotations"][OPERATOR] == owner
        assert job.status["restarts"] == 1
    eventually(lambda: any("ManagedByAnotherOperator" in job.event_reasons() for job in jobs), "an Event")


def test_a_job_of_another_operator_is_left_alone_until_it_is_handed_over(
    job: WatchedJob, api: ResourceClient, namespace: str
) -> None:
    manifest = manifests.job("job")
    manifest["metadata"]["annotations"] = {OPERATOR: "other/rljob-operator"}
    api.create("rljobs", manifest, namespace)
    eventually(lambda: "ManagedByAnotherOperator" in job.event_reasons(), "the Event", context=job.event_reasons)
    holds_for(1.0, lambda: not job.status and not job.pods, "the job to be left alone")
    api.merge("rljobs", "job", {"metadata": {"annotations": {OPERATOR: None}}}, namespace)
    job.kubelet.follow(namespace)
    job.wait_for(ConditionType.RUNNING)
    assert job.object["metadata"]["annotations"][OPERATOR] == OURS


def test_held_to_namespaces_it_acts_nowhere_else_and_outlives_a_lost_one(
    control_plane: ControlPlane,
    api: ResourceClient,
    kubelet: SimulatedKubelet,
    shared_operator: OperatorProcess,
    new_namespace: Callable[[], str],
    ports: Iterator[int],
    tmp_path: Path,
) -> None:
    if not shared_operator.crashed:
        shared_operator.stop()
    own, lost, elsewhere = (new_namespace() for _ in range(3))
    proxy = FaultProxy(control_plane.url, control_plane.ca, next(ports))
    proxy.start()
    token = install(api, control_plane.kubectl.with_name("helm"), "two-namespaces", [own, lost])
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", proxy.url, token)
    settings = SETTINGS | {"namespaces": f"{own} {lost}", "lease_namespace": "two-namespaces"}
    operator = OperatorProcess(kubeconfig, tmp_path / "log", next(ports), next(ports), settings)
    operator.start()
    with kept_running(operator, api, "two-namespaces"):
        try:
            of_others = WatchedJob(api, kubelet, elsewhere).create()
            of_lost = WatchedJob(api, kubelet, lost).create()
            of_lost.wait_for_pods(2)
            assert "finalizers" not in of_lost.object["metadata"]
            job = WatchedJob(api, kubelet, own).create()
            job.run()
            job.complete()
            job.delete()
            job.wait_gone()
            assert [str(request) for request in proxy.requests if request.status == 403] == []
            api.delete("namespaces", lost)
            eventually(lambda: api.find("namespaces", lost) is None, "the namespace to be gone")
            operator.stop()
            operator.start()
            assert operator.probe("healthz") == 200
            job.create().run()
            job.complete()
            assert "namespace unattended" in operator.log.read_text()
            assert not of_others.status
            assert not of_others.pods
        finally:
            operator.stop()
            proxy.stop()
