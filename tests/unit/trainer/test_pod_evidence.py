"""`rljob diagnose --job` finds the pods of every kind of workload, by the labels that their controllers set."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rljob_client.kubectl import ClusterError
from rljob_client.pod_evidence import collect_pods


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
WORKLOADS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], set[str]]] = {
    "Job": ([pod("train-x", **JOB)], {}, {"train-x"}),
    "JobSet": (
        [pod("train-node-0-0-a", **JOBSET), pod("train-node-0-1-b", **JOBSET)],
        {},
        {"train-node-0-0-a", "train-node-0-1-b"},
    ),
    "TrainJob": (
        [pod("train-node-0-0-a", **JOBSET, **{"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"})],
        {},
        {"train-node-0-0-a"},
    ),
    "RayCluster": ([pod("train-head-q", **RAY, **{"ray.io/cluster": "train"})], {}, {"train-head-q"}),
    "RayJob": (
        [pod("train-z7", **JOB), pod("train-5kq-worker", **RAY, **{"ray.io/cluster": "train-5kq"})],
        {"train": {"metadata": {"name": "train"}, "status": {"rayClusterName": "train-5kq"}}},
        {"train-z7", "train-5kq-worker"},
    ),
    "RLJob": ([pod("train-policy-0", **{"rljob.dev/job-name": "train"})], {}, {"train-policy-0"}),
    "PyTorchJob": ([pod("train-master-0", **{"training.kubeflow.org/job-name": "train"})], {}, {"train-master-0"}),
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
    pods, ray_jobs, expected = WORKLOADS[kind]
    cluster([*pods, OTHER], ray_jobs or None)
    with collect_pods(pods=(), job="train", namespace="research") as directories:
        assert {directory.name for directory in directories} == expected
        assert all((directory / "main.log").read_text() == "step 3 done\n" for directory in directories)


def test_a_job_without_pods_is_an_error(cluster: Callable[..., None]) -> None:
    cluster([OTHER], {})
    with (
        pytest.raises(ClusterError, match="expected pods of the job train, found none"),
        collect_pods(pods=(), job="train", namespace=None),
    ):
        pass
