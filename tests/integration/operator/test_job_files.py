"""Logs and files of a job through a real API server: the SDK, `rljob fetch` and `rljob diagnose --job`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from rljob_client import RLJobClient
from rljob_client.api_errors import KubernetesError, ObjectMissing
from rljob_client.cli import app
from rljob_client.errors import BadInput, OutputUnavailable
from rljob_client.run_directory.ledger import Ledger
from rljob_cluster.control_plane import ControlPlane
from rljob_testing.operator.api_client import RequestRefused, ResourceClient
from rljob_testing.operator.kubelet_server import KubeletServer
from rljob_testing.operator.simulated_kubelet import SimulatedKubelet
from rljob_testing.operator.watched_job import WatchedJob
from rljob_testing.patience import EFFECT_SECONDS, eventually
from rljob_trainer.models.resolve import resolve_model
from tests.integration.operator.conftest import restricted_pod
from tests.unit.ledger.samples import step_record


def test_logs_are_found_by_role_and_rank(client: RLJobClient, job: WatchedJob, kubelet_server: KubeletServer) -> None:
    job.create(policy={"replicas": 2, "gpusPerReplica": 2}).run(step=1)
    for name, text in (("controller", "step 1 ä\nstep 2\n"), ("policy-1", "rank 3\n"), ("policy-1.previous", "old\n")):
        kubelet_server.logs[job.namespace, f"job-{name}"] = text
    made = client.get("job")
    assert made.logs() == "step 1 ä\nstep 2\n"
    assert list(made.logs(follow=True)) == ["step 1 ä\n", "step 2\n"]
    assert made.logs("policy", 3) == made.logs("rollout", 2) == "rank 3\n"
    assert made.logs("policy", 3, previous=True) == "old\n"
    with pytest.raises(KubernetesError, match="previous terminated container"):
        made.logs(previous=True)
    with pytest.raises(ObjectMissing, match="with policy 4, found job-controller, job-policy-0, job-policy-1"):
        made.logs("policy", 4)


def test_metrics_and_model_come_from_the_volume(
    client: RLJobClient, job: WatchedJob, kubelet: SimulatedKubelet, volume: Path, tmp_path: Path
) -> None:
    job.create().run(step=2)
    made = client.get("job")
    with Ledger(volume / "ledger.jsonl") as ledger:
        ledger.begin_attempt(0.0, {}, {}, {})
        for step in (1, 2):
            ledger.commit(step_record(step, reward=0.25 * step))
    assert [step.reward.mean for step in made.metrics()] == [0.25, 0.5]
    assert "<title>" in made.report(tmp_path / "job.html").read_text()
    with pytest.raises(ObjectMissing, match="the run of job has no model: model/ is written after the last step"):
        made.model(tmp_path / "model")
    resolve_model("random://qwen3?hidden=32&layers=1&heads=2&kvHeads=2", tmp_path / "cache").rename(volume / "model")
    assert (made.model(tmp_path / "model") / "config.json").is_file()
    with pytest.raises(OutputUnavailable, match="found files; give another --output"):
        made.model(tmp_path / "model")
    (volume / "model" / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(BadInput):
        made.model(tmp_path / "damaged")
    made.suspend().wait("Suspended", timeout=EFFECT_SECONDS)
    with pytest.raises(ObjectMissing, match=r"name an image with tar and sleep \(--image, Job.reader_image\)"):
        made.metrics()
    made.reader_image = "busybox"
    assert len(made.metrics()) == 2
    eventually(lambda: not kubelet.reader_pods(job.namespace), "no reader pod left")


def rljob(control_plane: ControlPlane, *arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"KUBECONFIG": str(control_plane.kubeconfig), "COLUMNS": "200"})


def test_a_retained_claim_of_a_deleted_job_is_fetched_without_its_caches(
    control_plane: ControlPlane,
    api: ResourceClient,
    kubelet: SimulatedKubelet,
    namespace: str,
    volume: Path,
    tmp_path: Path,
) -> None:
    kubelet.follow(namespace)
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "job-checkpoints"}, "spec": spec}
    api.create("persistentvolumeclaims", claim, namespace)
    for name in (".model-cache", "plots"):
        (volume / name).mkdir()
    (volume / "big").write_bytes(bytes(3 << 20))
    there = ("--namespace", namespace)
    assert "name an image" in rljob(control_plane, "fetch", "job", *there).stderr
    output = str(tmp_path / "all")
    done = rljob(control_plane, "fetch", "job", *there, "--image", "trainer", "--path", ".", "-o", output)
    assert (done.exit_code, done.stdout) == (0, f"3 MiB in {output}\n")
    assert sorted(file.name for file in (tmp_path / "all").iterdir()) == ["big", "plots"]
    assert (tmp_path / "all" / "big").stat().st_size == 3 << 20


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("nobody",), 1, "expected an RLJob nobody, or the claim nobody-checkpoints"),
        (("job", "--path", "plots"), 1, "the run of job has no plots"),
        (("job", "--path", "../other"), 1, "expected a directory of the run"),
        (("job", "-o", "."), 85, "expected no directory ., or an empty one"),
        (("job", "--context", "there"), 1, "expected a kubeconfig with the context there"),
    ],
)
def test_a_fetch_that_fails_is_explained_and_leaves_no_pod(
    arguments: tuple[str, ...],
    code: int,
    message: str,
    control_plane: ControlPlane,
    job: WatchedJob,
    volume: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    job.create().run(step=1)
    done = rljob(control_plane, "fetch", *arguments, "--namespace", job.namespace)
    assert done.exit_code == code
    assert message in done.stderr
    eventually(lambda: not job.kubelet.reader_pods(job.namespace), "no reader pod left")


def test_a_reader_pod_that_does_not_start_is_explained(
    client: RLJobClient, job: WatchedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.create().run(step=1)
    job.kubelet.leave(job.namespace)
    monkeypatch.setattr("rljob_client.fetch_command._START_SECONDS", 1.0)
    with pytest.raises(KubernetesError, match=r"pod job-fetch-\w+ has not started after 1 s: see kubectl describe pod"):
        client.get("job").metrics()


def test_the_reader_pod_is_printed(control_plane: ControlPlane, job: WatchedJob) -> None:
    job.create().run(step=1)
    printed = rljob(control_plane, "fetch", "job", "--print-pod", "--namespace", job.namespace).stdout
    pod = yaml.safe_load(printed)
    assert pod["spec"]["volumes"] == [{"name": "run", "persistentVolumeClaim": {"claimName": "checkpoints"}}]
    assert pod["spec"]["containers"][0]["image"] == "localhost/rljob/trainer:test"
    assert job.kubelet.reader_pods(job.namespace) == []


# --- pods of any workload ---

JOB = {"batch.kubernetes.io/job-name": "train", "job-name": "train"}
JOBSET = {
    "jobset.sigs.k8s.io/jobset-name": "train",
    "jobset.sigs.k8s.io/replicatedjob-name": "node",
    "batch.kubernetes.io/job-name": "train-node-0",
    "job-name": "train-node-0",
}
RAY = {"app.kubernetes.io/created-by": "kuberay-operator", "ray.io/node-type": "worker"}
WORKLOADS = {
    "Job": {"train-x": JOB},
    "JobSet": {"train-node-0-0-a": JOBSET, "train-node-0-1-b": JOBSET},
    "TrainJob": {"train-node-0-0-a": {**JOBSET, "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
    "RayCluster": {"train-head-q": {**RAY, "ray.io/cluster": "train"}},
    "RLJob": {"train-policy-0": {"rljob.dev/job-name": "train"}},
    "PyTorchJob": {"train-master-0": {"training.kubeflow.org/job-name": "train"}},
}


@pytest.mark.parametrize("kind", WORKLOADS)
def test_the_pods_of_a_workload_are_diagnosed(
    kind: str,
    control_plane: ControlPlane,
    api: ResourceClient,
    kubelet: SimulatedKubelet,
    kubelet_server: KubeletServer,
    namespace: str,
) -> None:
    for name, labels in {**WORKLOADS[kind], "other": {"job-name": "other"}}.items():
        pod = api.create("pods", restricted_pod(name, labels=labels), namespace)
        kubelet.place(pod, "gpu-node")
        kubelet.end(pod, 137, reason="OOMKilled")
        kubelet_server.logs[namespace, name] = f"step 3 of {name}\n"
    done = rljob(control_plane, "diagnose", "--job", "train", "--namespace", namespace, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)
    gone = rljob(control_plane, "diagnose", "--job", "nobody", "--namespace", namespace)
    assert gone.exit_code == 2
    assert "expected pods of the job nobody, found none" in gone.stderr


RAY_JOBS = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "rayjobs.ray.io"},
    "spec": {
        "group": "ray.io",
        "names": {"kind": "RayJob", "plural": "rayjobs"},
        "scope": "Namespaced",
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}


def test_the_pods_of_a_ray_job_are_those_of_its_cluster(
    control_plane: ControlPlane, api: ResourceClient, namespace: str
) -> None:
    labels = {**RAY, "ray.io/cluster": "train-5kq"}
    api.create("pods", restricted_pod("train-5kq-worker", labels=labels), namespace)
    there = ("--job", "train", "--namespace", namespace)
    assert "expected pods of the job train, found none" in rljob(control_plane, "diagnose", *there).stderr
    ray_job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": "train"},
        "status": {"rayClusterName": "train-5kq"},
    }

    def created() -> bool:
        try:
            api.request("POST", f"/apis/ray.io/v1/namespaces/{namespace}/rayjobs", ray_job)
        except RequestRefused:
            return False
        return True

    api.create("customresourcedefinitions", RAY_JOBS)
    try:
        eventually(created, "the RayJob")
        assert rljob(control_plane, "diagnose", *there).exit_code == 0
    finally:
        api.delete("customresourcedefinitions", "rayjobs.ray.io")
        gone = lambda: api.find("customresourcedefinitions", "rayjobs.ray.io") is None  # noqa: E731
        eventually(gone, "the definition to be gone")
