"""Objects of others under names that a job needs are named, and never touched."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.conditions import ConditionType
from rljob_testing.operator.api_client import ApiClient
from rljob_testing.operator.eventually import eventually, holds_for
from rljob_testing.operator.fault_proxy import FaultProxy
from rljob_testing.operator.watched_job import WatchedJob

CLAIM = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "job-checkpoints"},
    "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
}
CONFIG = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "job-rljob"}, "data": {"mine": "yes"}}


@pytest.mark.parametrize(
    ("resource", "manifest"), [("persistentvolumeclaims", CLAIM), ("configmaps", CONFIG)], ids=["claim", "config map"]
)
def test_an_object_of_a_user_survives_the_job_of_its_name(
    job: WatchedJob, api: ApiClient, namespace: str, resource: str, manifest: dict[str, Any]
) -> None:
    name = manifest["metadata"]["name"]
    before = api.create(resource, manifest, namespace)
    job.create(checkpoint={})
    scheduled = eventually(lambda: condition(job, "ForeignObject"), "the condition", context=lambda: job.status)
    assert name in scheduled["message"]
    assert not job.pods
    holds_for(1.0, lambda: owners(api, resource, name, namespace) == [], "the object to be left alone")
    job.delete()
    job.wait_gone()
    after = api.get(resource, name, namespace)
    assert (after["metadata"]["uid"], after.get("data")) == (before["metadata"]["uid"], before.get("data"))
    assert "deletionTimestamp" not in after["metadata"]


def test_the_job_starts_when_the_foreign_object_is_gone(job: WatchedJob, api: ApiClient, namespace: str) -> None:
    api.create("configmaps", CONFIG, namespace)
    job.create()
    eventually(lambda: condition(job, "ForeignObject"), "the condition", context=lambda: job.status)
    api.delete("configmaps", "job-rljob", namespace)
    job.kubelet.follow(namespace)
    job.wait_for(ConditionType.RUNNING)


def test_a_job_of_a_deleted_jobs_name_waits_for_what_that_left(
    job: WatchedJob, api: ApiClient, namespace: str, proxy: FaultProxy
) -> None:
    job.create(checkpoint={}).run()
    job.delete()
    job.wait_gone()
    job.create(checkpoint={}).run()
    job.complete()


def test_a_retained_claim_outlives_its_job_and_serves_the_next_one(
    job: WatchedJob, api: ApiClient, namespace: str
) -> None:
    job.create(checkpoint={"retain": True}).run()
    claim = api.get("persistentvolumeclaims", "job-checkpoints", namespace)
    assert claim["metadata"]["labels"]["rljob.dev/retained"] == "true"
    job.delete()
    job.wait_gone()
    holds_for(3.0, lambda: not deleted(api, "job-checkpoints", namespace), "the claim to be left by garbage collection")
    job.create(checkpoint={"retain": True})
    scheduled = eventually(lambda: condition(job, "ForeignObject"), "the condition", context=lambda: job.status)
    assert "create the job with checkpoint: {volume: {persistentVolumeClaim:" in scheduled["message"]
    job.delete()
    job.wait_gone()
    job.create(checkpoint={"volume": {"persistentVolumeClaim": {"claimName": "job-checkpoints"}}}).run()
    job.complete()
    after = api.get("persistentvolumeclaims", "job-checkpoints", namespace)
    assert after["metadata"]["uid"] == claim["metadata"]["uid"]


def deleted(api: ApiClient, claim: str, namespace: str) -> bool:
    return "deletionTimestamp" in api.get("persistentvolumeclaims", claim, namespace)["metadata"]


def owners(api: ApiClient, resource: str, name: str, namespace: str) -> list[Any]:
    return list(api.get(resource, name, namespace)["metadata"].get("ownerReferences", []))


def condition(job: WatchedJob, reason: str) -> Any:
    return next((found for found in job.status.get("conditions", []) if found["reason"] == reason), None)
