"""What a job's own pods may do at the API server: get and patch their StepReport, get their RLJob, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rljob_cluster.control_plane import ControlPlane
from rljob_operator.labels import TRAINER_FIELD_MANAGER
from rljob_operator.names import controller_pod_name, ray_token_secret_name, service_account_name, worker_pod_name
from rljob_testing.operator import manifests
from rljob_testing.operator.api_client import ApiClient, refusal
from rljob_testing.operator.eventually import eventually
from rljob_testing.operator.installation import token_of
from rljob_testing.operator.simulated_kubelet import SimulatedKubelet
from rljob_testing.operator.watched_job import WatchedJob

REPORT = {"apiVersion": "rljob.dev/v1alpha1", "kind": "StepReport", "metadata": {"name": "job"}}

Attempt = Callable[[ApiClient, str], Any]

FORBIDDEN: dict[str, Attempt] = {
    "list step reports": lambda pod, namespace: pod.list("stepreports", namespace),
    "read another job's report": lambda pod, namespace: pod.get("stepreports", "other", namespace),
    "patch another job's report": lambda pod, namespace: pod.merge("stepreports", "other", {"step": 99}, namespace),
    "create a report": lambda pod, namespace: pod.create(
        "stepreports", REPORT | {"metadata": {"name": "new"}}, namespace
    ),
    "delete its report": lambda pod, namespace: pod.delete("stepreports", "job", namespace),
    "read another RLJob": lambda pod, namespace: pod.get("rljobs", "other", namespace),
    "patch its own RLJob": lambda pod, namespace: pod.merge("rljobs", "job", {"spec": {"suspend": True}}, namespace),
    "patch its own status": lambda pod, namespace: pod.merge(
        "rljobs", "job", {"status": {"step": 99}}, namespace, subresource="status"
    ),
    "list pods": lambda pod, namespace: pod.list("pods", namespace),
    "delete its worker": lambda pod, namespace: pod.delete("pods", worker_pod_name("job", "policy", 0), namespace),
    "read the Ray token": lambda pod, namespace: pod.get("secrets", ray_token(pod, namespace), namespace),
    "list secrets": lambda pod, namespace: pod.list("secrets", namespace),
    "list config maps": lambda pod, namespace: pod.list("configmaps", namespace),
    "list nodes": lambda pod, namespace: pod.list("nodes"),
    "list reports elsewhere": lambda pod, namespace: pod.list("stepreports", "default"),
    "make itself a token": lambda pod, namespace: token_of(pod, namespace, service_account_name("job")),
}


def ray_token(pod: ApiClient, namespace: str) -> str:
    uid = pod.get("rljobs", "job", namespace)["metadata"]["uid"]
    return ray_token_secret_name("job", uid)


@pytest.fixture
def pod_client(job: WatchedJob, api: ApiClient, control_plane: ControlPlane, kubelet: SimulatedKubelet) -> ApiClient:
    """The API server as the controller pod of `job` sees it; a job `other` is in the same namespace."""
    WatchedJob(api, kubelet, job.namespace, "other").create()
    pod = job.create().wait_for_pods(2) and job.controller_pod()
    eventually(lambda: api.find("stepreports", "other", job.namespace), "the other job's report")
    assert pod["spec"]["serviceAccountName"] == service_account_name("job")
    token = token_of(api, job.namespace, pod["spec"]["serviceAccountName"])
    return api.as_token(token, control_plane.ca)


def test_a_pod_reports_to_its_own_object_and_may_do_nothing_else(
    pod_client: ApiClient, api: ApiClient, namespace: str
) -> None:
    assert pod_client.get("stepreports", "job", namespace)["metadata"]["name"] == "job"
    report = REPORT | manifests.step_report(attempt=1, step=1)
    pod_client.apply("stepreports", report, namespace, manager=TRAINER_FIELD_MANAGER)
    assert api.get("stepreports", "job", namespace)["step"] == 1
    assert pod_client.get("rljobs", "job", namespace)["metadata"]["name"] == "job"

    answers = {what: refusal(ask, pod_client, namespace) for what, ask in FORBIDDEN.items()}
    assert {what: error and error.status for what, error in answers.items()} == dict.fromkeys(FORBIDDEN, 403)


def test_only_the_controller_pod_carries_a_token(job: WatchedJob) -> None:
    job.create()
    pods = job.wait_for_pods(2)
    mounted = {name: pod["spec"].get("automountServiceAccountToken") for name, pod in pods.items()}
    assert mounted == {controller_pod_name("job"): True, worker_pod_name("job", "policy", 0): False}
