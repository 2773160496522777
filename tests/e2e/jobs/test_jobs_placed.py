"""Jobs that cannot be placed or started where they are: they move to another node, or report what is missing."""

from __future__ import annotations

from typing import Any

from rljob_testing.cluster import (
    AdminKubectl,
    InstalledOperator,
    Object,
    condition,
    digits,
    finished,
    holds,
    status,
    wait_for_event,
)
from rljob_testing.patience import PATIENCE_SECONDS
from rljob_testing.repository import ROOT
from tests.e2e.test_built_images import OPERATOR


def test_a_job_that_cannot_be_placed_or_started_says_what_is_missing(
    jobs: AdminKubectl, operator: InstalledOperator
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
    jobs.wait("pod", "secret-controller", lambda pod: pod["status"].get("phase") == "Running")

    operator.install("jobs.startTimeoutSeconds=1")
    try:
        job = jobs.wait("rljob", "secret", holds("Failed", "PodCannotStart"))
    finally:
        operator.install()
    assert 'secret "nowhere" not found' in condition(job, "Failed")["message"]


HAS_PYTHON = OPERATOR
"""An image that is on the nodes anyway, without torch."""
ENDED_WITHIN_SECONDS = PATIENCE_SECONDS
TEXT = ROOT / "tests" / "data" / "oom" / "ForeignProcess" / "induced-a-neighbour-from-the-start.txt"
WORDS = TEXT.read_text().splitlines()[-1].removeprefix("torch.OutOfMemoryError: ")
TRAIN = """
import os, sys

class OutOfMemoryError(RuntimeError):
    '''As torch has it.'''

node_of_the_stranger, words = sys.argv[1:]
if os.environ["NODE_NAME"] == node_of_the_stranger:
    raise OutOfMemoryError(words)
print("trained")
"""


def job(name: str, stranger_on: str, **pod_spec: Any) -> Object:
    """A job of another trainer that runs out of memory on one node and is done at once on any other."""
    container = {"name": "rljob", "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}}}
    spec = {
        "trainer": {
            "image": HAS_PYTHON,
            "command": ["python", "-c", TRAIN, stranger_on, WORDS],
            "supportedSettings": ["rolloutSleep"],
        },
        "model": {"uri": "random://qwen3?layers=2"},
        "task": {"name": "digits"},
        "algorithm": {"steps": 1},
        # So that what the GPU's others hold is no engine of the job's own.
        "memory": {"rolloutSleep": "Level1"},
        "recovery": {"maxRestarts": 0},
        "policy": {"gpusPerReplica": 0, "template": {"spec": {"containers": [container], **pod_spec}}},
    }
    return {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": name}, "spec": spec}


def rather_on(node: str) -> Object:
    """Node preference that keeps fresh processes on the same node; the scheduler would choose a node at random."""
    there = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    preference = {"weight": 100, "preference": {"matchExpressions": [there]}}
    return {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preference]}}


def changes(found: Object) -> list[tuple[str, str]]:
    made = status(found).get("planChanges", [])
    return [(change["remedy"]["setting"], change["diagnosis"]["class"]) for change in made]


def test_a_job_avoids_the_node_of_a_foreign_process(jobs: AdminKubectl) -> None:
    jobs.apply(job("moves", stranger_on="cpu-node", affinity=rather_on("cpu-node")))
    found = jobs.wait("rljob", "moves", finished, ENDED_WITHIN_SECONDS)

    assert holds("Complete")(found), status(found)
    assert changes(found) == [("processes", "ForeignProcess"), ("excludedNodes", "ForeignProcess")]
    assert status(found)["plan"]["excludedNodes"] == ["cpu-node"]
    reasons = [attempt["reason"] for attempt in status(found)["attempts"]]
    assert reasons == ["DeviceOutOfMemory", "DeviceOutOfMemory", "AllStepsCommitted"]
    assert (status(found)["adjustments"], status(found)["restarts"]) == (2, 0)

    pod = jobs.get("pod", "moves-policy-0")["spec"]
    assert pod["nodeName"] == "gpu-node"
    required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    kept_off = {"key": "metadata.name", "operator": "NotIn", "values": ["cpu-node"]}
    assert required["nodeSelectorTerms"] == [{"matchFields": [kept_off]}]

    reasons = wait_for_event(jobs, "moves", "JobCompleted")
    assert reasons.count("PlanChanged") == 2
    assert reasons.index("OutOfMemory") <= reasons.index("PlanChanged") < reasons.index("JobCompleted")
