"""Jobs that another controller, or another installation of the operator, reconciles."""

from __future__ import annotations

from rljob_api.conditions import ConditionType
from rljob_operator.labels import OPERATOR
from rljob_testing.operator import manifests
from rljob_testing.operator.api_client import ApiClient, refusal
from rljob_testing.operator.eventually import eventually, holds_for
from rljob_testing.operator.watched_job import WatchedJob
from tests.integration.operator.conftest import OPERATOR_NAMESPACE


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
    assert job.object["metadata"]["annotations"][OPERATOR] == f"{OPERATOR_NAMESPACE}/rljob-operator"


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
