"""Jobs train in pods, despite failures of the operator, the pods and the nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rljob_cluster.layout import ClusterLayout
from rljob_testing import hub_server
from rljob_testing.cluster import (
    NAMESPACE,
    AdminKubectl,
    InstalledOperator,
    at_step,
    attempt,
    condition,
    digits,
    finished,
    holds,
    status,
    wait_for_event,
)
from rljob_testing.hub_server import REPOSITORY
from rljob_testing.patience import PATIENCE_SECONDS, eventually
from tests.e2e.test_built_images import TRAINER


def test_the_example_trains_while_the_operator_is_upgraded(
    jobs: AdminKubectl, operator: InstalledOperator, kubectl: AdminKubectl
) -> None:
    jobs.apply(digits())
    jobs.wait("rljob", "digits", holds("Scheduled"))
    controller, worker = jobs.get("pod", "digits-controller"), jobs.get("pod", "digits-policy-0")
    assert controller["spec"]["nodeName"] == "cpu-node"
    assert worker["spec"]["nodeName"] == "gpu-node"
    assert "nvidia.com/gpu" not in json.dumps(controller["spec"]["containers"][0]["resources"])

    system = AdminKubectl(kubectl.program, kubectl.kubeconfig, NAMESPACE)
    system("delete", "pod", "-l", "app.kubernetes.io/name=rljob-operator", "--grace-period=0", "--force")
    jobs.wait("stepreport", "digits", at_step(1), PATIENCE_SECONDS)
    operator.install("log.level=debug")

    job = jobs.wait("rljob", "digits", finished, PATIENCE_SECONDS)
    assert holds("Complete")(job), status(job)
    assert status(job)["step"] == 60
    assert status(job)["reward"] > 0.9
    assert len(status(job)["attempts"]) == 1
    assert jobs.get("pod", "digits-controller")["metadata"]["uid"] == controller["metadata"]["uid"]
    assert wait_for_event(jobs, "digits", "JobCompleted")[-1] == "JobCompleted"
    listed = jobs("get", "rljobs")
    assert "Complete" in listed
    assert "60/60" in listed


REWARDS = """
import os

TOKEN = os.environ["JUDGE_TOKEN"]


def share(answer, record):
    return answer.count(record["answer"]) / max(len(answer), 1)
"""
FILES = {
    "prompts.jsonl": "\n".join(f'{{"prompt": "{digit}:", "answer": "{digit}"}}' for digit in range(10)),
    "rewards.py": REWARDS,
}
"""Files of the task, as the tutorial has them, with a reward that needs a token."""


def test_a_deleted_worker_and_a_drained_node_cost_no_step(
    jobs: AdminKubectl, cluster: ClusterLayout, kubectl: AdminKubectl, tmp_path: Path
) -> None:
    steps = 400  # of less than 0.1 s: enough for all that is done to the job
    task = {"name": "jsonl", "args": {"path": "prompts.jsonl"}, "reward": "rewards:share"}
    task["files"] = {"configMap": "my-task"}
    start_hub(jobs)
    hub = {"name": "HF_ENDPOINT", "value": f"http://hub.{jobs.namespace}.svc:6443"}
    token = {"name": "JUDGE_TOKEN", "valueFrom": {"secretKeyRef": {"name": "judge", "key": "token"}}}
    spec: dict[str, Any] = {"task": task, "env": [token, hub], "model": {"uri": f"hf://{REPOSITORY}"}}
    jobs.apply(digits(algorithm={"steps": steps}, policy={"gpusPerReplica": 0}, **spec))
    job = jobs.wait("rljob", "digits", lambda job: condition(job, "Scheduled").get("reason") == "MissingObject")
    assert "my-task" in condition(job, "Scheduled")["message"]
    jobs.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "my-task"}, "data": FILES})
    job = jobs.wait("rljob", "digits", lambda job: condition(job, "Running").get("reason") == "PodCannotStart")
    assert 'secret "judge" not found' in condition(job, "Running")["message"]
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "judge"}, "stringData": {"token": "sesame-7"}}
    jobs.apply(secret)
    jobs.wait("stepreport", "digits", at_step(20), PATIENCE_SECONDS)
    assert "sesame-7" not in jobs("logs", "digits-controller")
    assert "sesame-7" not in jobs("get", "configmaps,pods,rljobs", "-o", "yaml")
    jobs("delete", "pod", "digits-policy-0", "--wait=false")

    jobs.wait("stepreport", "digits", at_step(40, attempt_number=2), PATIENCE_SECONDS)
    node = jobs.get("pod", "digits-policy-0")["spec"]["nodeName"]
    try:
        kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--pod-selector=rljob.dev/role=policy")
        jobs.wait("rljob", "digits", lambda job: attempt(job).get("number") == 3, PATIENCE_SECONDS)
        job = jobs.wait("rljob", "digits", finished, PATIENCE_SECONDS)
    finally:
        kubectl("uncordon", node)

    assert holds("Complete")(job), status(job)
    assert status(job)["restarts"] == 0
    assert [ended["reason"] for ended in status(job)["attempts"]] == [
        "PodsDisrupted",
        "PodsDisrupted",
        "AllStepsCommitted",
    ]
    counts = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:6443/downloads').read().decode())"
    downloads = json.loads(jobs("exec", "hub", "--", "python", "-c", counts))
    assert downloads["model.safetensors"] == 1, "three attempts of two pods share one download"
    assert _steps(jobs) == list(range(1, steps + 1))
    fetched = fetch(cluster, jobs, "digits", tmp_path / "model")
    assert fetched.returncode == 0, fetched.stderr
    assert (tmp_path / "model" / "model.safetensors").is_file()
    jobs("wait", "--for=delete", "pod", "-l", "app.kubernetes.io/name=rljob-fetch", "--timeout=240s", check=False)
    assert "fetch" not in jobs("get", "pods", "-o", "name")


def test_a_lost_rollout_pod_is_replaced_while_another_generates(jobs: AdminKubectl) -> None:
    policy = {"gpusPerReplica": 0, "template": on_node("gpu-node")}
    rollout = {"replicas": 2, "gpusPerReplica": 0, "template": on_node("cpu-node")}
    more_than_needed = {"steps": 50_000}
    jobs.apply(digits(topology="Disaggregated", algorithm=more_than_needed, policy=policy, rollout=rollout))
    jobs.wait("stepreport", "digits", at_step(10), PATIENCE_SECONDS)
    nodes = {name: jobs.get("pod", f"digits-{name}-0")["spec"]["nodeName"] for name in ("policy", "rollout")}
    assert nodes == {"policy": "gpu-node", "rollout": "cpu-node"}
    jobs("delete", "pod", "digits-rollout-0", "--wait=false")

    alone = wait_for_engines(jobs, _steps(jobs)[-1], "rollout-1")
    wait_for_engines(jobs, alone, "rollout-0", "rollout-1")
    wait_for_event(jobs, "digits", "PodReplaced")
    job = jobs.get("rljob", "digits")
    assert holds("Running")(job), status(job)
    assert status(job)["restarts"] == 0
    [attempt] = status(job)["attempts"]
    assert (attempt["podReplacements"], attempt.get("replacingPods", [])) == (1, [])
    steps = _steps(jobs)
    assert steps == list(range(1, len(steps) + 1))


def wait_for_engines(jobs: AdminKubectl, after: int, *engines: str) -> int:
    """The first step after `after` whose rollouts come from exactly these engines, once it is committed."""

    def look() -> int | None:
        later = (record for record in _ledger(jobs) if record["kind"] == "step" and record["step"] > after)
        return next((record["step"] for record in later if _engines(record) == set(engines)), None)

    step = eventually(look, f"a step after {after} with rollouts of {engines}", PATIENCE_SECONDS)
    assert step is not None
    return step


def _engines(record: dict[str, Any]) -> set[str]:
    return {name for name in record.get("memory_bytes", {}) if "rollout" in name}


def on_node(name: str) -> dict[str, object]:
    """A pod template that only this node satisfies, and that leaves room for another such pod on its two CPUs."""
    container = {"name": "rljob", "resources": {"requests": {"cpu": "500m"}}}
    selector = {"kubernetes.io/hostname": name}
    return {"spec": {"nodeSelector": selector, "tolerations": [{"operator": "Exists"}], "containers": [container]}}


def fetch(cluster: ClusterLayout, jobs: AdminKubectl, job: str, output: Path) -> subprocess.CompletedProcess[str]:
    """`rljob fetch` in the namespace of the test."""
    command = [sys.executable, "-m", "rljob_client", "fetch", job, "-n", jobs.namespace, "-o", str(output)]
    path = f"{cluster.binaries}{os.pathsep}{os.environ['PATH']}"
    variables = os.environ | {"KUBECONFIG": str(cluster.kubeconfig), "PATH": path}
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)


MODEL = digits()["spec"]["model"]["uri"]


def start_hub(jobs: AdminKubectl) -> None:
    """A hub with a tiny model in the test's namespace."""
    make = f"from rljob_trainer.models.resolve import resolve_model as r; print(r('{MODEL}'))"
    script = f'exec python /hub/hub_server.py "$(python -c "{make}")" 6443'
    source = Path(hub_server.__file__).read_text()
    jobs.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "hub"}, "data": {"hub_server.py": source}}
    )
    container = {
        "name": "hub",
        "image": TRAINER,
        "command": ["sh", "-c", script],
        "env": [{"name": "HOME", "value": "/tmp"}],
        "readinessProbe": {"tcpSocket": {"port": 6443}, "periodSeconds": 1},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "hub", "mountPath": "/hub"}],
    }
    spec = {
        "securityContext": {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}},
        "nodeSelector": {"kubernetes.io/hostname": "cpu-node"},
        "containers": [container],
        "volumes": [{"name": "hub", "configMap": {"name": "hub"}}],
    }
    metadata = {"name": "hub", "labels": {"app": "hub"}}
    jobs.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    service = {"selector": {"app": "hub"}, "ports": [{"port": 6443}]}
    jobs.apply({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "hub"}, "spec": service})
    jobs("wait", "--for=condition=Ready", "pod/hub", "--timeout=420s")


def _steps(kubectl: AdminKubectl) -> list[int]:
    """The committed steps, in the order of the ledger."""
    return [record["step"] for record in _ledger(kubectl) if record["kind"] == "step"]


def _ledger(kubectl: AdminKubectl) -> list[dict[str, Any]]:
    """The job's ledger, read from the volume's folder on this machine."""
    claim = kubectl.get("pvc", "digits-checkpoints")
    volume = kubectl.get("pv", claim["spec"]["volumeName"])["spec"]
    folder = Path((volume.get("hostPath") or volume["local"])["path"])
    complete, _, _ = (folder / "ledger.jsonl").read_text().rpartition("\n")
    return [json.loads(line) for line in complete.splitlines()]
