"""Input that the schema cannot refuse ends in a condition with a message; the operator keeps running."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.conditions import ConditionType
from rljob_operator import labels
from rljob_operator.names import controller_pod_name, worker_pod_name
from rljob_testing.operator import manifests
from rljob_testing.operator.api_client import ApiClient, refusal
from rljob_testing.operator.eventually import eventually, holds_for
from rljob_testing.operator.fault_proxy import FaultProxy
from rljob_testing.operator.operator_process import OperatorProcess
from rljob_testing.operator.simulated_kubelet import CPU_NODE, SimulatedKubelet
from rljob_testing.operator.watched_job import WatchedJob
from tests.integration.operator.conftest import RestartedWith


@pytest.fixture(autouse=True)
def the_operator_survives(operator: OperatorProcess) -> Any:
    yield
    assert not operator.crashed, operator.end_of_log()
    eventually(lambda: operator.probe("healthz") == 200, "a healthy operator")


def messages(job: WatchedJob) -> str:
    """Everything that the conditions tell a user."""
    return "\n".join(condition["message"] for condition in job.status.get("conditions", []))


def test_an_exceeded_quota_is_told_in_the_api_servers_words_and_waited_out(
    job: WatchedJob, api: ApiClient, namespace: str
) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}}
    api.create("resourcequotas", quota, namespace)
    eventually(lambda: api.get("resourcequotas", "few", namespace).get("status"), "the quota to be in force")
    job.create()
    eventually(
        lambda: "exceeded quota: few" in messages(job), "the quota in a condition", context=lambda: messages(job)
    )
    assert job.phase != "Failed"
    api.delete("resourcequotas", "few", namespace)
    job.wait_for_pods(2)


def test_a_webhook_that_does_not_answer_is_told_and_waited_out(job: WatchedJob, api: ApiClient, namespace: str) -> None:
    created = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]}
    webhook = {
        "name": "mesh.example.com",
        "clientConfig": {"url": "https://127.0.0.1:1/inject"},
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "rules": [created],
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    configuration = {"kind": "ValidatingWebhookConfiguration", "metadata": {"name": namespace}, "webhooks": [webhook]}
    api.create("validatingwebhookconfigurations", configuration)
    try:
        eventually(lambda: _is_called(api, namespace), "the webhook to be in force")
        job.create()
        eventually(
            lambda: 'failed calling webhook "mesh.example.com"' in messages(job),
            "the webhook in a condition",
            context=lambda: messages(job),
        )
    finally:
        api.delete("validatingwebhookconfigurations", namespace)
    job.wait_for_pods(2)


def _is_called(api: ApiClient, namespace: str) -> bool:
    if error := refusal(api.create, "configmaps", {"kind": "ConfigMap", "metadata": {"name": "a"}}, namespace):
        return "failed calling webhook" in str(error)
    api.delete("configmaps", "a", namespace)
    return False


def test_a_pod_that_the_namespace_does_not_admit_is_told(job: WatchedJob) -> None:
    job.create(controller={"template": {"spec": {"hostNetwork": True}}})
    eventually(lambda: "hostNetwork" in messages(job), "Pod Security's sentence", context=lambda: messages(job))


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("ErrImagePull", 'failed to pull image "localhost/no/such:image": not found'),
        ("CreateContainerConfigError", 'secret "no-such-secret" not found'),
    ],
)
def test_a_container_that_cannot_start_is_reported_and_given_up(
    job: WatchedJob, kubelet: SimulatedKubelet, restarted_with: RestartedWith, reason: str, message: str
) -> None:
    job.create()
    pod = job.wait_for_pods(2)[worker_pod_name("job", "policy", 0)]
    kubelet.place(pod, "gpu-node")
    kubelet.fail_container_start(pod, reason, message)
    kubelet.place(job.controller_pod(), CPU_NODE)
    kubelet.run(job.controller_pod(), ready=False)
    eventually(lambda: message in messages(job), "the kubelet's sentence", context=lambda: messages(job))
    with restarted_with(start_timeout_seconds=3):
        kubelet.follow(job.namespace)
        assert message in job.wait_for(ConditionType.FAILED)["message"]


def test_a_missing_claim_is_told_in_the_schedulers_words(job: WatchedJob, kubelet: SimulatedKubelet) -> None:
    job.create()
    message = '0/2 nodes are available: persistentvolumeclaim "checkpoints" not found.'
    for pod in job.wait_for_pods(2).values():
        kubelet.unschedulable(pod, message)
    eventually(lambda: '"checkpoints" not found' in messages(job), "the missing claim", context=lambda: messages(job))


def test_a_job_that_no_node_can_hold_says_which_resource_is_missing(job: WatchedJob, kubelet: SimulatedKubelet) -> None:
    job.create(policy={"gpusPerReplica": 16})
    kubelet.unschedulable(
        job.wait_for_pods(2)[worker_pod_name("job", "policy", 0)],
        "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
    )
    eventually(lambda: "16 nvidia.com/gpu" in messages(job), "the GPUs that no node has", context=lambda: messages(job))
    assert "gpu-node" in messages(job)


def test_a_half_placed_job_is_released_and_tried_again(
    job: WatchedJob, kubelet: SimulatedKubelet, restarted_with: RestartedWith, namespace: str
) -> None:
    job.create()
    first = job.wait_for_pods(2)
    kubelet.place(first[controller_pod_name("job")], CPU_NODE)
    kubelet.unschedulable(first[worker_pod_name("job", "policy", 0)], "0/2 nodes are available: 2 Insufficient cpu.")
    with restarted_with(placement_timeout_seconds=2):
        eventually(lambda: "deletionTimestamp" in job.controller_pod()["metadata"], "the placed pod to be released")
    kubelet.follow(namespace)
    job.wait_for(ConditionType.RUNNING)
    assert not {p["metadata"]["uid"] for p in first.values()} & {p["metadata"]["uid"] for p in job.pods.values()}
    assert job.status.get("restarts", 0) == 0


def test_a_foreign_pod_in_the_way_is_named_and_left_alone(job: WatchedJob, api: ApiClient, namespace: str) -> None:
    name = controller_pod_name("job")
    foreign = api.create("pods", foreign_pod(name, {labels.JOB_NAME: "job", labels.ROLE: "controller"}), namespace)
    job.create()
    eventually(lambda: name in messages(job), "the foreign pod's name in a condition", context=lambda: messages(job))
    holds_for(1.0, lambda: api.find("pods", name, namespace) is not None, "the foreign pod to stay")
    assert api.get("pods", name, namespace)["metadata"]["uid"] == foreign["metadata"]["uid"]


def foreign_pod(name: str, labels_: dict[str, str]) -> dict[str, Any]:
    context = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {"name": "main", "image": "other", "securityContext": context}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels_},
        "spec": {"containers": [container]},
    }


def test_a_status_edited_by_hand_is_set_right(job: WatchedJob, api: ApiClient, namespace: str) -> None:
    job.create().run(step=3)
    nonsense = {
        "step": 9,
        "attempts": [{"number": 7, "planGeneration": 9, "startTime": "2020-01-01T00:00:00Z", "fromStep": 1}],
        "plan": manifests.PLAN | {"generation": 9},
        "display": {"phase": "Perhaps"},
    }
    api.merge("rljobs", "job", {"status": nonsense}, namespace, subresource="status")
    eventually(lambda: job.phase in ("Running", "Recovering"), "a phase that is one", context=lambda: job.status)
    eventually(lambda: job.attempt > 7, "an attempt after the one of the status", context=lambda: job.status)
    job.wait_for(ConditionType.RUNNING)  # in new pods
    job.complete(attempt=job.attempt)


def test_a_status_removed_by_hand_is_made_anew(job: WatchedJob, api: ApiClient, namespace: str) -> None:
    job.create().run(step=3)
    api.merge("rljobs", "job", {"status": None}, namespace, subresource="status")
    job.wait_for(ConditionType.RUNNING)
    job.complete(attempt=job.attempt)


def test_a_step_report_beyond_belief_breaks_nothing(job: WatchedJob) -> None:
    job.create().run(step=3)
    memory = [{"role": "policy", "rank": rank, "peakReservedBytes": 2**52} for rank in range(256)]
    job.report(10**9, attempt=999, planGeneration=77, reward=-1e300, memory=memory)
    holds_for(1.0, lambda: job.phase == "Running", "the job to run on")
    job.report(4)
    job.complete()


def test_a_step_report_that_is_none_is_told_and_survived(
    job: WatchedJob, api: ApiClient, proxy: FaultProxy, namespace: str
) -> None:
    """Stored by an older version of the CRD, with fields that this one does not know."""
    job.create().run(step=3)
    crd = api.get("customresourcedefinitions", "stepreports.rljob.dev")
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    relaxed = [version | {"schema": {"openAPIV3Schema": anything}} for version in crd["spec"]["versions"]]
    api.merge("customresourcedefinitions", "stepreports.rljob.dev", {"spec": {"versions": relaxed}})
    try:
        older: dict[str, Any] = {"phase": "dreaming", "old": "field"}
        eventually(lambda: refusal(job.report, -5, **older) is None, "the older schema to be served")
        holds_for(1.5, lambda: job.phase == "Running", "the job to run on")
    finally:
        api.merge("customresourcedefinitions", "stepreports.rljob.dev", {"spec": {"versions": crd["spec"]["versions"]}})
    proxy.wait_until_quiet()
