"""The account that all jobs of a namespace share: made once, no job's, and of no use for another job's StepReport."""

from __future__ import annotations

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_operator.names import SHARED_ACCOUNT
from rljob_testing.operator.api_client import ApiClient
from rljob_testing.operator.eventually import eventually
from rljob_testing.operator.fault_proxy import FaultProxy
from rljob_testing.operator.simulated_kubelet import SimulatedKubelet
from rljob_testing.operator.watched_job import WatchedJob

RESOURCES = ("serviceaccounts", "roles", "rolebindings")


def uids(api: ApiClient, namespace: str) -> list[str]:
    return [api.get(resource, SHARED_ACCOUNT, namespace)["metadata"]["uid"] for resource in RESOURCES]


def test_the_second_job_of_a_namespace_writes_no_account(
    job: WatchedJob, api: ApiClient, kubelet: SimulatedKubelet, proxy: FaultProxy, namespace: str
) -> None:
    job.create().wait_for_pods(2)
    before = uids(api, namespace)
    proxy.wait_until_quiet()
    written = len(proxy.writes(namespace))
    second = WatchedJob(api, kubelet, namespace, "second")
    second.create().wait_for_pods(2)
    proxy.wait_until_quiet()
    assert not {write.resource for write in proxy.writes(namespace)[written:]} & set(RESOURCES)

    job.delete()
    job.wait_gone()
    assert uids(api, namespace) == before, "it goes with no job"
    second.run()


def test_an_account_that_is_deleted_is_made_again(job: WatchedJob, api: ApiClient, namespace: str) -> None:
    job.create().wait_for_pods(2)
    for resource in RESOURCES:
        api.delete(resource, SHARED_ACCOUNT, namespace)
    another = WatchedJob(api, job.kubelet, namespace, "another")
    another.create().wait_for_pods(2)
    eventually(lambda: uids(api, namespace), "the account to be there again")


def test_an_account_of_somebody_else_is_not_adopted(job: WatchedJob, api: ApiClient, namespace: str) -> None:
    mine = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": SHARED_ACCOUNT}}
    before = api.create("serviceaccounts", mine, namespace)
    job.create()
    condition = job.wait_for(ConditionType.SCHEDULED, "False", ConditionReason.FOREIGN_OBJECT)
    assert f"ServiceAccount {SHARED_ACCOUNT}" in condition["message"]
    assert "every job of the namespace needs that name" in condition["message"]
    assert api.get("serviceaccounts", SHARED_ACCOUNT, namespace)["metadata"] == before["metadata"]
    api.delete("serviceaccounts", SHARED_ACCOUNT, namespace)
    job.wait_for_pods(2)
