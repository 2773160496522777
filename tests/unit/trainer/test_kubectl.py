"""Failures of kubectl are one line with advice, and `rljob diagnose --job` finds the pods of every kind of workload."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rljob_client.kubectl import Kubectl, KubectlError, explain_failure
from rljob_client.pod_evidence import collect_pods

NO_SERVER = "The connection to the server localhost:8080 was refused - did you specify the right host or port?"
HEAD_OF_LOG = 'E1127 12:36:29.637011   28 memcache.go] "Unhandled Error" err="couldn\'t get API: connection refused"\n'


@pytest.mark.parametrize(
    ("stderr", "line"),
    [
        (
            HEAD_OF_LOG * 5 + NO_SERVER,
            f"a cluster that responds, found: {NO_SERVER}; start it, or select the cluster (",
        ),
        (HEAD_OF_LOG, "expected a cluster that responds, found: E1127 "),
        ("Unable to connect to the server: dial tcp: lookup k8s: no such host", "a cluster that responds"),
        ('error: context "nope" does not exist', "expected a context, found: "),
        ('error: error loading config file "/k": yaml: line 1: did not find expected node content', "a kubeconfig"),
        ('Error from server (Forbidden): rljobs.rljob.dev "sums" is forbidden: User', "expected permission, found: "),
        ("Please enter Username: error: EOF", "expected credentials that the cluster accepts"),
        ('error: the server doesn\'t have a resource type "rljob"', "expected a cluster with RLJob's CRDs"),
        ('Error from server (NotFound): namespaces "research" not found', "an existing one with -n"),
        ("Warning: deprecated\nerror: pods is invalid\nsecond", "kubectl get rljob sums: error: pods is invalid"),
        ("", "kubectl get rljob sums: no message"),
    ],
)
def test_a_failure_of_kubectl_is_one_line(stderr: str, line: str) -> None:
    found = explain_failure("get rljob sums", stderr)
    assert line in found
    assert "\n" not in found


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (None, "expected kubectl in PATH, found none: install it"),
        ("#!/bin/sh\nread name || echo no user name >&2\nexit 1\n", "kubectl version: no user name"),
    ],
)
def test_without_a_working_kubectl_it_fails_at_once(
    program: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if program:
        (tmp_path / "kubectl").write_text(program)
        (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KubectlError) as failure:
        Kubectl().run("version")
    assert str(failure.value) == message


def pod(name: str, **labels: str) -> dict[str, Any]:
    ended = {"reason": "OOMKilled", "exitCode": 137}
    status = {"containerStatuses": [{"name": "main", "state": {"terminated": ended}, "lastState": {}}]}
    return {"metadata": {"name": name, "labels": labels}, "status": status}


JOB = {"batch.kubernetes.io/job-name": "train", "job-name": "train"}
JOBSET = {
    "jobset.sigs.k8s.io/jobset-name": "train",
    "jobset.sigs.k8s.io/replicatedjob-name": "node",
    "batch.kubernetes.io/job-name": "train-node-0",
    "job-name": "train-node-0",
}
RAY = {"app.kubernetes.io/created-by": "kuberay-operator", "ray.io/node-type": "worker"}
WORKLOADS: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "Job": ([pod("train-x", **JOB)], None),
    "JobSet": ([pod("train-node-0-0-a", **JOBSET), pod("train-node-0-1-b", **JOBSET)], None),
    "TrainJob": (
        [pod("train-node-0-0-a", **JOBSET, **{"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"})],
        None,
    ),
    "RayCluster": ([pod("train-head-q", **RAY, **{"ray.io/cluster": "train"})], None),
    "RayJob": (
        [pod("train-z7", **JOB), pod("train-5kq-worker", **RAY, **{"ray.io/cluster": "train-5kq"})],
        {"train": {"metadata": {"name": "train"}, "status": {"rayClusterName": "train-5kq"}}},
    ),
    "RLJob": ([pod("train-policy-0", **{"rljob.dev/job-name": "train"})], None),
    "PyTorchJob": ([pod("train-master-0", **{"training.kubeflow.org/job-name": "train"})], None),
}
OTHER = pod("other", **{"batch.kubernetes.io/job-name": "other"})
KUBECTL = """#!{python}
import json, sys
pods, ray_jobs = json.load(open({state!r}))
words = [word for word in sys.argv[1:] if not word.startswith("--namespace")]
if words[:2] == ["get", "pods"]:
    name, _, value = words[3].partition("=")
    print(json.dumps({{"items": [pod for pod in pods if pod["metadata"]["labels"].get(name) == value]}}))
elif words[:2] == ["get", "rayjobs.ray.io"]:
    if ray_jobs is None:
        sys.exit("error: the server doesn't have a resource type \\"rayjobs\\"")
    print(json.dumps(ray_jobs[words[2]]) if words[2] in ray_jobs else "")
elif words[0] == "logs":
    print("step 3 done")
else:
    sys.exit(f"unexpected {{words}}")
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[dict[str, Any]], Any], None]:
    """Puts a kubectl in PATH that selects pods by their labels, as the API server does. None: without KubeRay."""

    def put(pods: list[dict[str, Any]], ray_jobs: Any) -> None:
        state = tmp_path / "state.json"
        state.write_text(json.dumps([pods, ray_jobs]))
        program = tmp_path / "kubectl"
        program.write_text(KUBECTL.format(python=sys.executable, state=str(state)))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return put


@pytest.mark.parametrize("kind", WORKLOADS)
def test_the_pods_of_a_workload_are_found(kind: str, cluster: Callable[..., None]) -> None:
    pods, ray_jobs = WORKLOADS[kind]
    cluster([*pods, OTHER], ray_jobs)
    with collect_pods(pods=(), job="train", namespace="research") as directories:
        assert {directory.name for directory in directories} == {pod["metadata"]["name"] for pod in pods}
        assert all((directory / "main.log").read_text() == "step 3 done\n" for directory in directories)


def test_a_job_without_pods_is_an_error(cluster: Callable[..., None]) -> None:
    cluster([OTHER], {})
    with (
        pytest.raises(KubectlError, match="expected pods of the job train, found none"),
        collect_pods(pods=(), job="train", namespace=None),
    ):
        pass
