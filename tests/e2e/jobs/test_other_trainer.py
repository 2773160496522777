"""Trainers that are not RLJob's, unchanged, run out of memory: as RLJobs, and as plain Jobs with one label."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_cluster.images import load
from rljob_cluster.layout import ClusterLayout
from rljob_testing.cluster import AdminKubectl, InstalledOperator, Object, finished, holds, status, wait_for_event
from rljob_testing.operator.api_client import ResourceClient
from rljob_testing.patience import PATIENCE_SECONDS, eventually
from rljob_testing.repository import ROOT
from tests.e2e.image_container import build_images
from tests.e2e.test_built_images import TRAINER


@pytest.fixture(scope="module")
def trl(operator: InstalledOperator, cluster: ClusterLayout) -> Object:
    """The example, with its image on the nodes."""
    job: Object = yaml.safe_load((ROOT / "examples" / "trl.yaml").read_text())
    build_images("trl")
    load(cluster, job["spec"]["trainer"]["image"])
    return job


def test_trl_gets_more_host_memory_and_resumes_from_its_checkpoint(jobs: AdminKubectl, trl: Object) -> None:
    jobs.apply(trl)
    job = jobs.wait("rljob", "trl", finished, PATIENCE_SECONDS)
    assert holds("Complete")(job), status(job)

    first, second = status(job)["attempts"]
    assert first["reason"] == "HostOutOfMemory"
    assert first["diagnosis"]["class"] == "HostMemory"
    assert first["remedy"]["setting"] == "hostMemory"
    assert second["reason"] == "AllStepsCommitted"
    assert status(job)["adjustments"] == 1
    assert status(job)["restarts"] == 0
    container = jobs.get("pod", "trl-policy-0")["spec"]["containers"][0]
    assert container["resources"]["limits"]["memory"] == "1350Mi"

    reasons = wait_for_event(jobs, "trl", "JobCompleted")
    assert [reason for reason in reasons if reason in ("OutOfMemory", "PlanChanged")] == ["OutOfMemory", "PlanChanged"]
    assert _steps_of_the_second_attempt(jobs) == [5, 6, 7, 8]


def container_with(memory: str) -> Object:
    return {"resources": {"requests": {"cpu": "500m"}, "limits": {"memory": memory}}}


def _steps_of_the_second_attempt(kubectl: AdminKubectl) -> list[int]:
    """Steps that the pod's trainer did itself, by TRL's own record, which a checkpoint takes along."""
    claim = kubectl.get("pvc", "trl-checkpoints")
    volume: dict[str, Any] = kubectl.get("pv", claim["spec"]["volumeName"])["spec"]
    folder = Path((volume.get("hostPath") or volume["local"])["path"])
    state = json.loads((folder / "checkpoint-8" / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"]] == list(range(1, 9))
    lines = kubectl("logs", "trl-policy-0").splitlines()
    done = sum("'loss':" in line and "train_loss" not in line for line in lines)
    return list(range(9 - done, 9))


def test_an_adapter_makes_trl_fit_its_memory_limit(jobs: AdminKubectl, trl: Object) -> None:
    """The same script and limit: the operator may raise no limit, so that the adapter has to."""
    spec = {
        **trl["spec"],
        "trainer": {**trl["spec"]["trainer"], "adapter": "TRL"},
        "env": [{"name": "GRADIENT_CHECKPOINTING", "value": "0"}],  # most memory is then that of the micro-batch
        "policy": {"gpusPerReplica": 0, "template": {"spec": {"containers": [container_with(memory="1050Mi")]}}},
        "recovery": {"maxAdjustments": 3, "maxRestarts": 0},
    }
    jobs.apply({**trl, "metadata": {"name": "adapted"}, "spec": spec})
    job = jobs.wait("rljob", "adapted", finished, PATIENCE_SECONDS)
    assert holds("Complete")(job), status(job)
    *failed, last = status(job)["attempts"]
    assert failed
    assert {attempt["remedy"]["setting"] for attempt in failed} == {"microBatchTokens"}
    assert last["reason"] == "AllStepsCommitted"
    container = jobs.get("pod", "adapted-policy-0")["spec"]["containers"][0]
    assert container["resources"]["limits"]["memory"] == "1050Mi"
    assert "rljob: GRPOConfig: per_device_train_batch_size 8 -> " in jobs("logs", "adapted-policy-0")


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
        pytest.param(FILL_MEMORY, "HostMemory (95%): the kernel killed it at its memory limit of 128Mi", id="killed"),
        pytest.param(RAISE, "4.00 GiB", id="raised"),
    ],
)
def test_a_job_that_runs_out_of_memory_gets_events(
    jobs: AdminKubectl, cluster: ClusterLayout, program: str, cause: str
) -> None:
    api = ResourceClient.from_kubeconfig(cluster.kubeconfig)
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
