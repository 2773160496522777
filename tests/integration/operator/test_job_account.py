"""The account that all jobs of a namespace share: written once, and good for the StepReport of the own job alone."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_cluster.control_plane import ControlPlane
from rljob_operator.labels import TRAINER_FIELD_MANAGER
from rljob_operator.names import SHARED_ACCOUNT, controller_pod_name, worker_pod_name
from rljob_testing.operator import manifests
from rljob_testing.operator.api_client import ResourceClient, refusal
from rljob_testing.operator.fault_proxy import FaultProxy
from rljob_testing.operator.installation import token_of
from rljob_testing.operator.simulated_kubelet import SimulatedKubelet
from rljob_testing.operator.watched_job import WatchedJob
from rljob_testing.patience import eventually


@pytest.fixture
def pod_client(
    job: WatchedJob, api: ResourceClient, control_plane: ControlPlane, kubelet: SimulatedKubelet
) -> ResourceClient:
    """The API server as the controller pod of `job` sees it; a job `other` is in the same namespace."""
    WatchedJob(api, kubelet, job.namespace, "other").create()
    pod = job.create().wait_for_pods(2) and job.controller_pod()
    eventually(lambda: api.find("stepreports", "other", job.namespace), "the other job's report")
    assert pod["spec"]["serviceAccountName"] == SHARED_ACCOUNT
    client = api.as_token(token_of(api, job.namespace, SHARED_ACCOUNT, pod), control_plane.ca)
    wait_for_rules(api, client, control_plane, job.namespace)
    return client


def wait_for_rules(api: ResourceClient, client: ResourceClient, control_plane: ControlPlane, namespace: str) -> None:
    """The account's Role and the policy are in force a moment after they are stored. `client`: the controller pod."""
    of_no_pod = api.as_token(token_of(api, namespace, SHARED_ACCOUNT), control_plane.ca)

    def may_write(client: ResourceClient) -> bool:
        return refusal(client.merge, "stepreports", "job", {}, namespace, "status") is None

    eventually(lambda: may_write(client) and not may_write(of_no_pod), "Role and policy to be in force")


def test_a_pod_reports_to_its_own_object_and_may_do_nothing_else(
    pod_client: ResourceClient, api: ResourceClient, namespace: str
) -> None:
    pod_client.apply(
        "stepreports",
        manifests.step_report("job", attempt=1, step=1),
        namespace,
        manager=TRAINER_FIELD_MANAGER,
        subresource="status",
    )
    assert api.get("stepreports", "job", namespace)["status"]["step"] == 1
    before = api.get("stepreports", "job", namespace)
    read = pod_client.merge("stepreports", "job", {}, namespace, subresource="status")
    assert read["status"]["step"] == 1
    assert api.get("stepreports", "job", namespace) == before, "an empty patch is a read"

    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace},
    }
    rules = pod_client.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", review)["status"]
    about_itself = {"authorization.k8s.io", "authentication.k8s.io"}
    [rule] = [rule for rule in rules["resourceRules"] if about_itself.isdisjoint(rule["apiGroups"])]
    assert (rule["verbs"], rule["apiGroups"], rule["resources"]) == (["patch"], ["rljob.dev"], ["stepreports/status"])
    for other_body in ({"status": {"step": 99}}, {}):
        refused = refusal(pod_client.merge, "stepreports", "other", other_body, namespace, "status")
        assert refused is not None
        assert refused.status == 403

    def kept() -> dict[str, Any]:
        metadata = api.get("stepreports", "job", namespace)["metadata"]
        return {name: metadata.get(name) for name in hostile}

    hostile = {
        "finalizers": ["example.com/forever"],
        "ownerReferences": [],
        "labels": {"app.kubernetes.io/managed-by": None},
        "annotations": {"a": "b"},
    }
    unchanged = kept()
    pod_client.merge("stepreports", "job", {"metadata": hostile, "status": {"step": 2}}, namespace, "status")
    assert kept() == unchanged

    diagnosis = {"class": "HostMemory", "confidence": 1, "message": "m"}
    pressure = {"role": "policy", "stepsLeft": 1}
    beyond: list[dict[str, Any]] = [
        {"memory": [{"role": "policy", "rank": 0, "peakRssBytes": 2**53 + 1}]},
        {"planGeneration": 2**63 - 1},
        {"seconds": {"rollout": 1e300}},
        {"memoryPressure": pressure | {"diagnosis": diagnosis | {"numbers": {"n": 2**60}}}},
        {"memoryPressure": pressure | {"diagnosis": diagnosis | {"numbers": {"n" * 65: 1}}}},
        {"updateTime": f"2026-01-01T00:00:00.{'0' * 100}Z"},
    ]
    for status in beyond:
        refused = refusal(pod_client.merge, "stepreports", "job", {"status": status}, namespace, "status")
        assert refused is not None
        assert refused.status == 422


def test_only_the_token_of_the_controller_pod_writes_its_report(
    job: WatchedJob, api: ResourceClient, control_plane: ControlPlane, namespace: str
) -> None:
    """RBAC lets the account write every report of the namespace: the policy asks for the pod of the token."""
    borrowed = {"template": {"spec": {"serviceAccountName": SHARED_ACCOUNT, "automountServiceAccountToken": True}}}
    pods = job.create(policy=borrowed).wait_for_pods(2)
    tokens = {
        "of the controller": token_of(api, namespace, SHARED_ACCOUNT, pods[controller_pod_name("job")]),
        "of a worker": token_of(api, namespace, SHARED_ACCOUNT, pods[worker_pod_name("job", "policy", 0)]),
        "of no pod": token_of(api, namespace, SHARED_ACCOUNT),
    }
    wait_for_rules(api, api.as_token(tokens["of the controller"], control_plane.ca), control_plane, namespace)
    for whose, token in tokens.items():
        client = api.as_token(token, control_plane.ca)
        refused = refusal(client.merge, "stepreports", "job", {"status": {"step": 1}}, namespace, "status")
        if whose == "of the controller":
            assert refused is None
        else:
            assert refused is not None
            assert refused.status == 403
            assert "only the controller pod job-controller may write the StepReport job" in refused.message


def uids(api: ResourceClient, namespace: str) -> list[str]:
    names = ("serviceaccounts", "roles", "rolebindings")
    return [api.get(resource, SHARED_ACCOUNT, namespace)["metadata"]["uid"] for resource in names]


def test_the_account_is_written_once_and_goes_with_no_job(
    job: WatchedJob, api: ResourceClient, kubelet: SimulatedKubelet, proxy: FaultProxy, namespace: str
) -> None:
    pods = job.create().wait_for_pods(2)
    mounted = {name: pod["spec"].get("automountServiceAccountToken") for name, pod in pods.items()}
    assert mounted == {controller_pod_name("job"): True, worker_pod_name("job", "policy", 0): False}
    before = uids(api, namespace)
    proxy.wait_until_quiet()
    written = len(proxy.writes(namespace))
    second = WatchedJob(api, kubelet, namespace, "second").create()
    second.wait_for_pods(2)
    proxy.wait_until_quiet()
    resources = {write.resource for write in proxy.writes(namespace)[written:]}
    assert resources.isdisjoint({"serviceaccounts", "roles", "rolebindings"})
    job.delete()
    job.wait_gone()
    assert uids(api, namespace) == before
    second.run()
