"""Objects that the API server, the cluster or a user puts in the way of a job: named in a condition, and waited out."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_operator import labels
from rljob_operator.names import SHARED_ACCOUNT, controller_pod_name
from rljob_testing.operator import manifests
from rljob_testing.operator.api_client import ResourceClient, refusal
from rljob_testing.operator.fault_proxy import FaultProxy
from rljob_testing.operator.operator_process import OperatorProcess
from rljob_testing.operator.watched_job import WatchedJob
from rljob_testing.patience import eventually, holds_for
from rljob_testing.repository import ROOT
from tests.integration.operator.conftest import NewJob, restricted_pod

Object = dict[str, Any]

CONFIG_MAP: Object = {"kind": "ConfigMap", "metadata": {"name": "job-rljob"}, "data": {"mine": "yes"}}
CLAIM: Object = {
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "job-checkpoints"},
    "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
}
JOBS, GPUS, STORAGE = "count/rljobs.rljob.dev", "requests.nvidia.com/gpu", "requests.storage"


@pytest.fixture(autouse=True)
def the_operator_survives(operator: OperatorProcess) -> Iterator[None]:
    yield
    assert not operator.crashed, operator.end_of_log()
    eventually(lambda: operator.probe("healthz") == 200, "a healthy operator")


def wait_for_message(job: WatchedJob, text: str) -> None:
    """Wait until a condition of the job contains the text."""

    def messages() -> str:
        return "\n".join(condition["message"] for condition in job.status.get("conditions", []))

    eventually(lambda: text in messages(), text, context=messages)


def quota(api: ResourceClient, namespace: str, hard: dict[str, str]) -> tuple[str, str]:
    manifest = {"kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": hard}}
    api.create("resourcequotas", manifest, namespace)

    def is_in_force() -> bool:
        status = api.get("resourcequotas", "few", namespace).get("status", {})
        return bool(status.get("hard") == hard) and status.get("used", {}).keys() == hard.keys()

    eventually(is_in_force, "the quota to be in force")
    return "resourcequotas", "few"


def webhook(api: ResourceClient, namespace: str) -> tuple[str, str]:
    """A webhook for ConfigMaps, which does not answer."""
    created = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]}
    of_mesh = {
        "name": "mesh.example.com",
        "clientConfig": {"url": "https://127.0.0.1:1/inject"},
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "rules": [created],
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    configuration = {"kind": "ValidatingWebhookConfiguration", "metadata": {"name": namespace}, "webhooks": [of_mesh]}
    api.create("validatingwebhookconfigurations", configuration)

    def is_called() -> bool:
        if error := refusal(api.create, "configmaps", {"kind": "ConfigMap", "metadata": {"name": "a"}}, namespace):
            return "failed calling webhook" in str(error)
        api.delete("configmaps", "a", namespace)
        return False

    eventually(is_called, "the webhook to be in force")
    return "validatingwebhookconfigurations", namespace


def second_refusal(api: ResourceClient, namespace: str) -> str:
    """The message that refuses a second job; empty if it was admitted. The quota controller may reset the count before
    it hears of the first one."""
    refused = refusal(api.create, "rljobs", manifests.job("second"), namespace)
    if refused is not None and refused.status == 403:
        return refused.message
    refusal(api.delete, "rljobs", "second", namespace)
    return ""


def test_obstacles_are_named_and_waited_out(new_job: NewJob, api: ResourceClient) -> None:
    """All at once: the operator tries again after half a minute. The quotas are those of docs/security.md."""
    page = (ROOT / "docs" / "security.md").read_text()
    assert all(f"`{resource}`" in page for resource in (JOBS, GPUS, STORAGE))
    waiting: list[tuple[WatchedJob, str, tuple[str, str]]] = []

    def obstruct(job: WatchedJob, message: str, obstacle: tuple[str, str], **spec: Any) -> None:
        # Admission hears of the status of a quota a moment after it is stored, and refuses everything until then.
        eventually(lambda: refusal(job.create, **spec) is None, "the job to be admitted")
        waiting.append((job, message, obstacle))

    job = new_job()
    obstruct(job, "exceeded quota: few", quota(api, job.namespace, {"pods": "1"}))
    job = new_job()
    obstacle = quota(api, job.namespace, {JOBS: "1", STORAGE: "1Gi"})
    obstruct(job, "exceeded quota: few, requested: requests.storage=50Gi", obstacle, checkpoint={})
    message = eventually(partial(second_refusal, api, job.namespace), "the quota to count the first job")
    assert "count/rljobs.rljob.dev=1" in message
    job = new_job()
    obstacle = quota(api, job.namespace, {GPUS: "0"})
    obstruct(job, "exceeded quota: few, requested: requests.nvidia.com/gpu=1", obstacle)
    job = new_job()
    obstruct(job, 'failed calling webhook "mesh.example.com"', webhook(api, job.namespace))
    job = new_job()
    api.create("configmaps", CONFIG_MAP, job.namespace)
    obstruct(job, "job-rljob", ("configmaps", "job-rljob"))
    job = new_job()
    account = {"kind": "ServiceAccount", "metadata": {"name": SHARED_ACCOUNT}}
    mine = api.create("serviceaccounts", account, job.namespace)
    obstruct(job, "every job of the namespace needs that name", ("serviceaccounts", SHARED_ACCOUNT))

    for job, message, _ in waiting:
        wait_for_message(job, message)
        assert job.phase != "Failed"
    assert job.condition(ConditionType.SCHEDULED)["reason"] == ConditionReason.FOREIGN_OBJECT
    assert api.get("serviceaccounts", SHARED_ACCOUNT, job.namespace)["metadata"] == mine["metadata"]
    for job, _, (resource, name) in waiting:
        api.delete(resource, name, job.namespace)
    for job, _, _ in waiting:
        job.wait_for_pods(2)


@pytest.mark.parametrize(
    ("resource", "manifest"), [("persistentvolumeclaims", CLAIM), ("configmaps", CONFIG_MAP)], ids=["claim", "map"]
)
def test_an_object_of_a_user_survives_the_job_of_its_name(
    job: WatchedJob, api: ResourceClient, namespace: str, resource: str, manifest: Object
) -> None:
    name = manifest["metadata"]["name"]
    before = api.create(resource, manifest, namespace)
    job.create(checkpoint={})
    scheduled = job.wait_for(ConditionType.SCHEDULED, "False", ConditionReason.FOREIGN_OBJECT)
    assert name in scheduled["message"]
    assert not job.pods
    job.delete()
    job.wait_gone()
    after = api.get(resource, name, namespace)
    assert (after["metadata"], after.get("data")) == (before["metadata"], before.get("data"))


def test_a_retained_claim_outlives_its_job_and_serves_the_next_one(
    job: WatchedJob, api: ResourceClient, namespace: str
) -> None:
    job.create(checkpoint={"retain": True}).run()
    claim = api.get("persistentvolumeclaims", "job-checkpoints", namespace)
    assert claim["metadata"]["labels"]["rljob.dev/retained"] == "true"
    job.delete()
    job.wait_gone()
    job.create(checkpoint={"retain": True})
    scheduled = job.wait_for(ConditionType.SCHEDULED, "False", ConditionReason.FOREIGN_OBJECT)
    assert "create the job with checkpoint: {volume: {persistentVolumeClaim:" in scheduled["message"]
    job.delete()
    job.wait_gone()
    job.create(checkpoint={"volume": {"persistentVolumeClaim": {"claimName": "job-checkpoints"}}}).run()
    job.complete()
    after = api.get("persistentvolumeclaims", "job-checkpoints", namespace)["metadata"]
    assert (after["uid"], "deletionTimestamp" in after) == (claim["metadata"]["uid"], False)


def test_a_job_of_a_deleted_jobs_name_waits_for_what_that_left(job: WatchedJob) -> None:
    job.create(checkpoint={}).run()
    job.delete()
    job.wait_gone()
    job.create(checkpoint={}).run()
    job.complete()


def test_a_foreign_pod_in_the_way_is_named_and_left_alone(job: WatchedJob, api: ResourceClient, namespace: str) -> None:
    name = controller_pod_name("job")
    labels_ = {labels.JOB_NAME: "job", labels.ROLE: "controller"}
    foreign = api.create("pods", restricted_pod(name, labels=labels_), namespace)
    job.create()
    wait_for_message(job, name)
    holds_for(1.0, lambda: api.find("pods", name, namespace) is not None, "the foreign pod to stay")
    assert api.get("pods", name, namespace)["metadata"]["uid"] == foreign["metadata"]["uid"]


def test_a_pod_that_the_namespace_does_not_admit_is_explained(job: WatchedJob) -> None:
    job.create(controller={"template": {"spec": {"hostNetwork": True}}})
    wait_for_message(job, "hostNetwork")


def test_a_status_that_is_edited_or_removed_by_hand_is_set_right(new_job: NewJob, api: ResourceClient) -> None:
    edited, removed = (new_job().create().run(step=3) for _ in range(2))
    nonsense = {
        "step": 9,
        "attempts": [{"number": 7, "planGeneration": 9, "startTime": "2020-01-01T00:00:00Z", "fromStep": 1}],
        "plan": manifests.PLAN | {"generation": 9},
        "display": {"phase": "Perhaps"},
    }
    api.merge("rljobs", "job", {"status": nonsense}, edited.namespace, subresource="status")
    api.merge("rljobs", "job", {"status": None}, removed.namespace, subresource="status")
    eventually(lambda: edited.phase in ("Running", "Recovering"), "a phase that is one", context=lambda: edited.status)
    eventually(lambda: edited.attempt > 7, "an attempt after the one of the status", context=lambda: edited.status)
    for job in (edited, removed):
        job.wait_for(ConditionType.RUNNING)  # in new pods
        job.complete(attempt=job.attempt)


def test_a_step_report_beyond_belief_breaks_nothing(job: WatchedJob, api: ResourceClient, proxy: FaultProxy) -> None:
    """The second one was stored by an older version of the CRD, with fields that this one does not know."""
    job.create().run(step=3)
    memory = [{"role": "policy", "rank": rank, "peakReservedBytes": 2**52} for rank in range(256)]
    job.report(10**9, attempt=999, planGeneration=77, reward=-1e300, memory=memory)
    holds_for(1.0, lambda: job.phase == "Running", "the job to run on")
    job.report(4)
    crd = api.get("customresourcedefinitions", "stepreports.rljob.dev")
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    relaxed = [version | {"schema": {"openAPIV3Schema": anything}} for version in crd["spec"]["versions"]]
    api.merge("customresourcedefinitions", "stepreports.rljob.dev", {"spec": {"versions": relaxed}})
    try:
        older: Object = {"phase": "dreaming", "old": "field"}
        eventually(lambda: refusal(job.report, -5, **older) is None, "the older schema to be served")
        holds_for(1.5, lambda: job.phase == "Running", "the job to run on")
    finally:
        api.merge("customresourcedefinitions", "stepreports.rljob.dev", {"spec": {"versions": crd["spec"]["versions"]}})
    proxy.wait_until_quiet()
