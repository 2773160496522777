"""The hardening checklist of docs/security.md on a real API server."""

from __future__ import annotations

from rljob_testing.operator import manifests
from rljob_testing.operator.api_client import ApiClient, refusal
from rljob_testing.operator.eventually import eventually
from rljob_testing.operator.watched_job import WatchedJob
from rljob_testing.repository import ROOT

RESOURCES = ("count/rljobs.rljob.dev", "requests.nvidia.com/gpu", "requests.storage")


def test_a_quota_limits_jobs_gpus_and_storage(job: WatchedJob, api: ApiClient, namespace: str) -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    assert all(f"`{resource}`" in page for resource in RESOURCES)

    limit(api, namespace, "1", "0", "1Gi")
    # Admission hears of the status of a quota a moment after it is stored, and refuses everything until then.
    eventually(lambda: refusal(job.create, checkpoint={}) is None, "the job to be admitted")
    second = refusal(api.create, "rljobs", manifests.job("second"), namespace)
    assert second
    assert (second.status, "count/rljobs.rljob.dev=1" in second.message) == (403, True)
    wait_for_message(job, "exceeded quota: team, requested: requests.storage=50Gi")

    limit(api, namespace, "1", "0", "1Ti")
    wait_for_message(job, "exceeded quota: team, requested: requests.nvidia.com/gpu=1")

    limit(api, namespace, "1", "8", "1Ti")
    job.wait_for_pods(2)


def limit(api: ApiClient, namespace: str, *amounts: str) -> None:
    hard = dict(zip(RESOURCES, amounts, strict=True))
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "team"}, "spec": {"hard": hard}}
    api.apply("resourcequotas", quota, namespace)

    def status() -> dict[str, dict[str, str]]:
        found: dict[str, dict[str, str]] = api.get("resourcequotas", "team", namespace).get("status", {})
        return found

    def is_in_force() -> bool:
        return status().get("hard") == hard and status().get("used", {}).keys() == hard.keys()

    eventually(is_in_force, "the quota to be in force", context=status)


def wait_for_message(job: WatchedJob, text: str) -> None:
    def messages() -> str:
        return " ".join(condition["message"] for condition in job.status.get("conditions", []))

    eventually(lambda: text in messages(), text, context=messages)
