"""A plain Job with one label runs out of memory on a real kubelet: the probe is injected, and Events have the cause."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_cluster.layout import ClusterLayout
from rljob_testing.cluster.kubectl import Kubectl
from rljob_testing.operator.api_client import ApiClient
from rljob_testing.operator.eventually import eventually
from rljob_testing.patience import PATIENCE_SECONDS
from tests.e2e.test_built_images import TRAINER

Object = dict[str, Any]
FILL_MEMORY = "held = []\nwhile True: held.append(bytearray(16 << 20))"
RAISE = "raise MemoryError('Unable to allocate 4.00 GiB for an array')"


def job(program: str) -> Object:
    container = {
        "name": "trainer",
        "image": TRAINER,
        "command": ["python", "-c", program],
        "resources": {"requests": {"cpu": "50m"}, "limits": {"memory": "128Mi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    pod = {
        "restartPolicy": "Never",
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
    }
    template = {"metadata": {"labels": {"rljob.dev/diagnose": "true"}}, "spec": pod}
    metadata = {"name": "grpo", "labels": {"app": "grpo"}}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {"backoffLimit": 0, "template": template},
    }


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        pytest.param(FILL_MEMORY, "HostMemory (98%): the kernel killed it at its memory limit of 128Mi", id="killed"),
        pytest.param(RAISE, "4.00 GiB", id="raised"),
    ],
)
def test_a_job_that_runs_out_of_memory_gets_events(
    jobs: Kubectl, cluster: ClusterLayout, program: str, cause: str
) -> None:
    api = ApiClient.from_kubeconfig(cluster.kubeconfig)
    jobs.apply(job(program))

    def seen() -> list[Object]:
        return [event for event in api.list("events", jobs.namespace) if event["reason"] == "OutOfMemory"]

    def of_the_job() -> list[str]:
        return [event["message"] for event in seen() if event["involvedObject"]["kind"] == "Job"]

    [message] = eventually(
        of_the_job, "the Event of the Job", PATIENCE_SECONDS, lambda: jobs("get", "pods", "-o", "yaml")
    )
    assert cause in message
    assert {event["involvedObject"]["kind"] for event in seen()} == {"Job", "Pod"}
    [pod] = api.list("pods", jobs.namespace, "job-name=grpo")
    assert pod["spec"]["initContainers"][0]["name"] == "rljob-probe"
    assert pod["status"]["initContainerStatuses"][0]["state"]["terminated"]["exitCode"] == 0
