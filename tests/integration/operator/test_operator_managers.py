"""Jobs that another controller, or another installation of the operator, reconciles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rljob_api.conditions import ConditionType
from rljob_operator.labels import OPERATOR
from rljob_testing.operator import manifests
from rljob_testing.operator.api_client import ApiClient, refusal
from rljob_testing.operator.eventually import eventually, holds_for
from rljob_testing.operator.operator_process import OperatorProcess
from rljob_testing.operator.restarts import OPERATOR_NAMESPACE
from rljob_testing.operator.simulated_kubelet import SimulatedKubelet
from rljob_testing.operator.watched_job import WatchedJob
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
    other_operator: OperatorProcess, api: ApiClient, kubelet: SimulatedKubelet, namespace: str
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
    job: WatchedJob, api: ApiClient, namespace: str
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


def test_a_job_that_names_another_manager_is_left_to_it_for_good(
    job: WatchedJob, api: ApiClient, namespace: str
) -> None:
    job.create(managedBy="kueue.x-k8s.io/multikueue")
    holds_for(1.0, lambda: not job.status and not job.pods, "the job to be left alone")
    for changed in (None, "rljob.dev/operator"):
        refused = refusal(api.merge, "rljobs", "job", {"spec": {"managedBy": changed}}, namespace)
        assert refused is not None
        assert "managedBy" in refused.message
    job.delete()
    job.wait_gone()
