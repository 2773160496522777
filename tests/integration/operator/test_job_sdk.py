"""The Python SDK with a real API server and operator: the life of a job, refusals, rights, the notebook."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import nbformat
import pytest
import yaml
from nbclient import NotebookClient

from rljob_api.exit_codes import ExitCode
from rljob_api.job import RLJob
from rljob_api.manifest import ManifestError
from rljob_client import JobEnded, JobFailed, JobTimeout, RLJobClient
from rljob_client.api_errors import AccessDenied, KubernetesError, ObjectExists, ObjectMissing, ObjectRefused
from rljob_cluster.control_plane import ControlPlane
from rljob_testing.operator import manifests
from rljob_testing.operator.api_client import ResourceClient
from rljob_testing.operator.installation import rendered, token_of
from rljob_testing.operator.kubelet_server import KubeletServer
from rljob_testing.operator.operator_process import write_kubeconfig
from rljob_testing.operator.watched_job import WatchedJob
from rljob_testing.patience import EFFECT_SECONDS, eventually
from rljob_testing.repository import EXAMPLES, ROOT

Result = TypeVar("Result")

# --- the life of a job ---


def test_a_job_is_created_followed_suspended_and_deleted(client: RLJobClient, job: WatchedJob) -> None:
    made = client.create(manifests.job("job"))
    assert (made.phase, made.pods()) == ("Pending", [])
    job.run(step=3)
    seen: list[str] = []
    assert made.wait("Running", timeout=EFFECT_SECONDS, on_progress=lambda job: seen.append(job.phase)) is made
    assert seen[-1] == made.phase == "Running"
    eventually(lambda: made.refresh().status.step == 3, "the reported step")
    assert [pod["metadata"]["name"] for pod in made.pods()] == ["job-controller", "job-policy-0"]
    report = made.report_status()
    assert report
    assert report.step == 3
    with pytest.raises(JobTimeout, match="expected Complete of job within 1 s, found Running: "):
        made.wait(timeout=1)

    made.suspend().wait("Suspended", timeout=EFFECT_SECONDS)
    assert made.pods() == []
    made.resume().wait("Running", timeout=EFFECT_SECONDS)
    assert made.patch({"algorithm": {"steps": 20}}).spec.algorithm.steps == 20
    job.complete(steps=20, attempt=2)
    assert made.wait(timeout=EFFECT_SECONDS).status.step == 20
    assert made.wait("Running", timeout=EFFECT_SECONDS).phase == "Complete"
    with pytest.raises(JobEnded, match="expected Recovering of job, found Complete: "):
        made.wait("Recovering", timeout=EFFECT_SECONDS)
    eventually(lambda: made.events()[-1]["reason"] == "JobCompleted", "the Event", context=made.events)
    assert {"Suspended", "AttemptStarted"} <= {event["reason"] for event in made.events()}
    assert repr(made) == f"<Job {client.namespace}/job: Complete 20/20>"

    made.delete()
    made.wait("Deleted", timeout=EFFECT_SECONDS)
    assert made.wait("Deleted", timeout=EFFECT_SECONDS).is_deleted
    with pytest.raises(ObjectMissing, match="found that it was deleted"):
        made.wait(timeout=EFFECT_SECONDS)
    with pytest.raises(ObjectMissing, match=r'rljobs\.rljob\.dev "job" not found; check its name and its namespace'):
        client.get("job")


def test_a_failed_job_raises_its_own_explanation_and_is_tried_again(client: RLJobClient, job: WatchedJob) -> None:
    made = client.create(manifests.job("job"))
    job.run(step=0)
    job.end_controller(ExitCode.BAD_INPUT, step=0)
    with pytest.raises(JobFailed, match=rf"job has failed \(BadInput\): .*{ExitCode.BAD_INPUT.meaning}"):
        made.wait(timeout=EFFECT_SECONDS)
    assert (made.phase, made.is_true("Stalled")) == ("Failed", True)
    # The failure of the earlier spec does not end this wait.
    made.retry().wait("Running", timeout=EFFECT_SECONDS)
    assert made.spec.retry == 1
    assert [attempt.reason for attempt in made.status.attempts] == ["BadInput", None]


def test_jobs_are_listed_and_watched_with_their_deletion(
    client: RLJobClient, new_job: Callable[..., WatchedJob]
) -> None:
    other = new_job()
    for name in ("one", "two"):
        client.create(manifests.job(name, suspend=True))
    other.create(suspend=True)
    assert [job.name for job in client.list()] == ["one", "two"]
    everywhere = [(job.namespace, job.name) for job in client.list(all_namespaces=True)]
    assert {(client.namespace, "one"), (other.namespace, "job")} <= set(everywhere)
    seen: list[tuple[str, bool]] = []
    for job in client.watch(timeout=EFFECT_SECONDS):
        if not seen:
            client.get("two").delete()
        seen.append((job.name, job.is_deleted))
        if job.is_deleted:
            break
    assert {("one", False), ("two", False)} <= set(seen)
    assert seen[-1] == ("two", True)


def test_a_watch_goes_on_after_the_api_server_was_away(client: RLJobClient, control_plane: ControlPlane) -> None:
    made = client.create(manifests.job("job", managedBy="example.com/other"))
    changes = made.watch(timeout=EFFECT_SECONDS)
    assert next(changes).spec.suspend is False
    control_plane.kill_api_server()
    control_plane.start_api_server()
    made.suspend()
    assert next(job for job in changes if job.spec.suspend).name == "job"


# --- manifests and refusals ---


def test_a_manifest_is_a_file_an_object_or_an_rljob(client: RLJobClient, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(manifests.job("file", suspend=True)))
    assert client.create(file).name == "file"
    typed = RLJob.model_validate(
        manifests.job("typed", suspend=True, policy={"template": {"spec": {"hostUsers": None}}})
    )
    assert client.create(typed).spec == typed.spec
    assert client.create(manifests.job("tried"), dry_run=True).spec.algorithm.group_size == 8
    assert [job.name for job in client.list()] == ["file", "typed"]
    file.write_text(yaml.safe_dump(manifests.job("file", algorithm={"stepz": 3})))
    with pytest.raises(ManifestError, match=r"job.yaml:\d+: spec.algorithm.stepz: unknown field; did you mean steps\?"):
        client.create(str(file))


def test_a_refused_manifest_is_explained_in_the_words_of_the_rules(client: RLJobClient) -> None:
    with pytest.raises(ObjectRefused) as refused:
        client.create(manifests.job(queueName="gpus", gang="Volcano", algorithm={"steps": 0}))
    assert dict(refused.value.problems)["spec.algorithm.steps"].endswith("should be greater than or equal to 1")
    with pytest.raises(ObjectRefused) as refused:
        client.create(manifests.job(queueName="gpus", gang="Volcano"))
    message = "Volcano cannot schedule jobs that Kueue admits: write gang: Auto, or remove queueName"
    assert refused.value.problems == (("spec.gang", message),)
    with pytest.raises(ObjectRefused, match=r'^unknown field "spec\.algorithm\.stepz"$'):
        client.create(manifests.job(algorithm={"stepz": 1}))
    made = client.create(manifests.job(suspend=True))
    with pytest.raises(ObjectExists, match=r'found: rljobs\.rljob\.dev "job" already exists; choose another name'):
        client.create(manifests.job())
    with pytest.raises(ObjectRefused, match=r"^spec\.model: cannot change after the job is created"):
        made.patch({"model": {"uri": "random://qwen3?layers=1"}})
    with pytest.raises(ValueError, match="expected Deleted or one of Suspended, Fits, "):
        made.wait("Done")


def test_what_is_missing_is_one_sentence(client: RLJobClient, control_plane: ControlPlane) -> None:
    elsewhere = RLJobClient("nowhere", kubeconfig=str(control_plane.kubeconfig))
    with pytest.raises(ObjectMissing, match='expected a namespace, found: namespaces "nowhere" not found; name'):
        elsewhere.create(manifests.job())
    with pytest.raises(KubernetesError, match=r"expected a cluster with RLJob's CRDs, found: .*; install RLJob"):
        client.api.get("rayjobs", "job")
    made = client.create(manifests.job(suspend=True))
    with pytest.raises(ObjectMissing, match="expected a pod of job with policy 3, found none, because it is Pending"):
        made.logs("policy", 3)


def test_each_right_that_is_documented_is_needed_and_enough(
    client: RLJobClient,
    control_plane: ControlPlane,
    api: ResourceClient,
    job: WatchedJob,
    kubelet_server: KubeletServer,
    volume: Path,
    tmp_path: Path,
) -> None:
    namespace = job.namespace
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "ann"}}
    api.create("serviceaccounts", account, namespace)
    token = token_of(api, namespace, "ann")
    kubeconfig = write_kubeconfig(tmp_path / "ann", control_plane.url, token, control_plane.ca)
    ann = RLJobClient(namespace, kubeconfig=str(kubeconfig))
    with pytest.raises(AccessDenied, match=r'expected permission, found: .*cannot create resource "rljobs".*; ask'):
        ann.create(manifests.job())
    roles = rendered(control_plane.kubectl.with_name("helm"), "rljob-system", "rbac-people")
    grant(api, namespace, next(role for role in roles if role["metadata"]["name"].endswith("-viewer")))
    job.create().run(step=1)
    kubelet_server.logs[namespace, "job-controller"] = "step 1\n"
    seen = once_granted(lambda: ann.get("job"))
    assert seen.report_status()
    with pytest.raises(AccessDenied, match='cannot patch resource "rljobs"'):
        seen.suspend()
    grant(api, namespace, next(role for role in roles if role["metadata"]["name"].endswith("-editor")))
    once_granted(lambda: seen.patch({"ttlSecondsAfterFinished": 3600}))
    for read in (seen.pods, seen.logs, seen.events, seen.metrics):
        with pytest.raises(AccessDenied, match=r'cannot (list|get) resource "(pods|events)"'):
            read()
    [manifest] = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    grant(api, namespace, yaml.safe_load(manifest))
    (volume / "ledger.jsonl").touch()
    assert len(once_granted(seen.pods)) == 2
    assert (seen.logs(), seen.metrics()) == ("step 1\n", [])
    seen.events()


def once_granted(call: Callable[[], Result]) -> Result:
    """The result of `call`. An API server takes a moment to learn of a right."""

    def tried() -> list[Result]:
        try:
            return [call()]
        except AccessDenied:
            return []

    return eventually(tried, "the right")[0]


def grant(api: ResourceClient, namespace: str, role: dict[str, Any]) -> None:
    """Give the rules of a Role or ClusterRole in the namespace to ann."""
    name = role["metadata"]["name"]
    api.create("roles", {**role, "kind": "Role", "metadata": {"name": name}}, namespace)
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    subject = {"kind": "ServiceAccount", "name": "ann", "namespace": namespace}
    body = {"metadata": {"name": name}, "roleRef": reference, "subjects": [subject]}
    api.create("rolebindings", body, namespace)


# --- the notebook ---


def test_the_notebook_runs(
    control_plane: ControlPlane, job: WatchedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the cells that need a trained model left out, since the pods of this cluster are simulated."""
    kubeconfig = yaml.safe_load(control_plane.kubeconfig.read_text())
    for context in kubeconfig["contexts"]:
        context["context"]["namespace"] = job.namespace
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    job.kubelet.follow(job.namespace)
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    notebook.cells = [cell for cell in notebook.cells if "needs-pods" not in cell.metadata.get("tags", [])]
    shutil.copy(EXAMPLES / "digits-cpu.yaml", tmp_path)
    NotebookClient(notebook, timeout=EFFECT_SECONDS, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(str(output.get("text", "")) for cell in notebook.cells for output in cell.get("outputs", ()))
    assert "Suspended" in printed
    assert job.api.list("rljobs", job.namespace) == []
