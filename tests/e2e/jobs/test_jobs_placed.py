"""Placement of a job's pods, and reports of pods that cannot be placed or cannot start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rljob_testing.cluster.installed_operator import InstalledOperator
from rljob_testing.cluster.job_status import condition, digits, holds, wait_for_event
from rljob_testing.cluster.kubectl import Kubectl
from rljob_testing.patience import PATIENCE_SECONDS
from tests.e2e.pods import phase

MORE_THAN_NEEDED = {"steps": 50_000}
"""For jobs that must not complete while a test looks at them: a step takes less than 0.1 s."""


@pytest.fixture
def only_gpu_nodes(kubectl: Kubectl) -> Iterator[None]:
    kubectl("cordon", "cpu-node")
    yield
    kubectl("uncordon", "cpu-node")


def test_nodes_with_gpus_are_labelled_as_gpus_come_and_go(jobs: Kubectl, kubectl: Kubectl) -> None:
    def labelled(node: dict[str, Any]) -> bool:
        return bool(node["metadata"]["labels"].get("rljob.dev/has-gpus") == "true")

    assert labelled(kubectl.wait("node", "gpu-node", labelled))
    assert not labelled(kubectl.get("node", "cpu-node"))


@pytest.mark.usefixtures("only_gpu_nodes")
def test_without_gpu_free_nodes_the_controller_runs_hidden_or_waits(jobs: Kubectl) -> None:
    jobs.apply(
        digits("anywhere", algorithm=MORE_THAN_NEEDED),
        digits("insists", algorithm=MORE_THAN_NEEDED, controller={"requireGpuFreeNode": True}),
    )

    job = jobs.wait("rljob", "insists", lambda job: condition(job, "Scheduled").get("reason") == "NoGpuFreeNode")
    assert "requireGpuFreeNode" in condition(job, "Scheduled")["message"]

    job = jobs.wait("rljob", "anywhere", holds("Scheduled", "ControllerOnGpuNode"))
    controller = jobs.get("pod", "anywhere-controller")
    assert controller["spec"]["nodeName"] == "gpu-node"
    environment = {entry["name"]: entry.get("value", "") for entry in controller["spec"]["containers"][0]["env"]}
    assert environment["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    wait_for_event(jobs, "anywhere", "ControllerOnGpuNode")


def test_a_job_that_cannot_be_placed_or_started_says_what_is_missing(
    jobs: Kubectl, operator: InstalledOperator
) -> None:
    def container(**fields: Any) -> dict[str, Any]:
        return {"template": {"spec": {"containers": [{"name": "rljob", **fields}]}}}

    secret = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "nowhere", "key": "token"}}}
    jobs.apply(
        digits("gpus", policy={"gpusPerReplica": 16}),
        digits("image", policy=container(image="localhost/nobody/nothing:1")),
        digits("secret", policy=container(env=[secret])),
        digits("claim", checkpoint={"volume": {"persistentVolumeClaim": {"claimName": "nowhere"}}}),
    )

    def expect_message(job: str, type_: str, words: str) -> None:
        jobs.wait("rljob", job, lambda found: words in condition(found, type_).get("message", ""))

    expect_message("gpus", "Scheduled", "no node has 16 nvidia.com/gpu: the largest, gpu-node, has 8")
    expect_message("claim", "Scheduled", 'persistentvolumeclaim "nowhere" not found')
    expect_message("image", "Running", "localhost/nobody/nothing:1")
    expect_message("secret", "Running", 'secret "nowhere" not found')
    jobs.wait("pod", "secret-controller", lambda pod: phase(pod) == "Running")

    operator.install("jobs.startTimeoutSeconds=1")
    try:
        job = jobs.wait("rljob", "secret", holds("Failed", "PodCannotStart"))
    finally:
        operator.install()
    assert 'secret "nowhere" not found' in condition(job, "Failed")["message"]


def test_a_job_is_suspended_resumed_and_deleted_at_any_moment(jobs: Kubectl) -> None:
    jobs.apply(digits(algorithm=MORE_THAN_NEEDED))
    jobs.wait("rljob", "digits", holds("Scheduled"))
    jobs("patch", "rljob", "digits", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    jobs.wait("rljob", "digits", holds("Suspended"), PATIENCE_SECONDS)
    assert jobs("get", "pods", "-o", "name") == ""

    jobs("patch", "rljob", "digits", "--type=merge", "-p", '{"spec": {"suspend": false}}')
    jobs.wait("rljob", "digits", holds("Scheduled"))
    jobs("delete", "rljob", "digits", "--timeout=240s")
    assert jobs("get", "pods", "-o", "name") == ""
