"""Labelled pods of other workloads: Events about the pod and its Job, once, with the rights of the chart."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from rljob_testing.operator.api_client import ResourceClient
from rljob_testing.operator.operator_process import OperatorProcess
from rljob_testing.patience import eventually
from tests.integration.operator.conftest import restricted_pod

Object = dict[str, Any]
LABELS = {"rljob.dev/diagnose": "true"}


def test_a_job_and_its_pod_get_an_event_once(operator: OperatorProcess, api: ResourceClient, namespace: str) -> None:
    spec = {"backoffLimit": 0, "template": {"metadata": {"labels": LABELS}, "spec": restricted_pod("")["spec"]}}
    path = f"/apis/batch/v1/namespaces/{namespace}/jobs"
    api.request("POST", path, {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "sums"}, "spec": spec})
    [pod] = eventually(lambda: api.list("pods", namespace, "job-name=sums"), "the Job's pod")
    run_out_of_memory(api, pod)
    eventually(lambda: notes(api, namespace, "Job", "sums"), "the Event of the Job", context=operator.end_of_log)
    [of_pod] = notes(api, namespace, "Pod", pod["metadata"]["name"])
    assert of_pod.startswith("container trainer ran out of memory: HostMemory")
    assert "512Mi" in of_pod

    operator.stop()
    operator.start()
    later = api.create("pods", restricted_pod("later", labels=LABELS), namespace)
    run_out_of_memory(api, later)
    eventually(lambda: notes(api, namespace, "Pod", "later"), "the Event of the later pod", context=operator.end_of_log)
    assert len(notes(api, namespace, "Pod", pod["metadata"]["name"])) == 1
    assert len(notes(api, namespace, "Job", "sums")) == 1


def run_out_of_memory(api: ResourceClient, pod: Object) -> None:
    """The status that a kubelet writes after the kernel killed the container."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    end = {"reason": "OOMKilled", "exitCode": 137, "startedAt": now, "finishedAt": now}
    container = {
        "name": "trainer",
        "image": "trl:1",
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": {"terminated": end},
    }
    status = {"phase": "Failed", "containerStatuses": [container]}
    api.patch_status("pods", pod["metadata"]["name"], status, pod["metadata"]["namespace"])


def notes(api: ResourceClient, namespace: str, kind: str, name: str) -> list[str]:
    """Messages of the operator's Events about an object."""
    found = [
        event
        for event in api.list("events", namespace)
        if event["involvedObject"]["kind"] == kind
        and event["involvedObject"]["name"] == name
        and event["reason"] == "OutOfMemory"
    ]
    return [event["message"] for event in found]
