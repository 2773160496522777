"""Jobs train in pods, whatever happens to the operator, to the pods and to the nodes meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

from rljob_cluster.layout import ClusterLayout
from rljob_testing.cluster.installed_operator import NAMESPACE, InstalledOperator
from rljob_testing.cluster.job_status import at_step, attempt, digits, event_reasons, finished, holds, status
from rljob_testing.cluster.kubectl import Kubectl
from rljob_testing.patience import PATIENCE_SECONDS


def test_the_example_reaches_its_reward_while_the_operator_is_killed_and_upgraded(
    jobs: Kubectl, operator: InstalledOperator, kubectl: Kubectl
) -> None:
    jobs.apply(digits())
    jobs.wait("rljob", "digits", holds("Scheduled"))
    controller, worker = jobs.get("pod", "digits-controller"), jobs.get("pod", "digits-policy-0")
    assert controller["spec"]["nodeName"] == "cpu-node"
    assert worker["spec"]["nodeName"] == "gpu-node"
    assert "nvidia.com/gpu" not in json.dumps(controller["spec"]["containers"][0]["resources"])

    system = Kubectl(kubectl.program, kubectl.kubeconfig, NAMESPACE)
    system("delete", "pod", "-l", "app.kubernetes.io/name=rljob-operator", "--grace-period=0", "--force")
    jobs.wait("rljob", "digits", holds("Running"), PATIENCE_SECONDS)
    operator.install("log.level=debug")

    job = jobs.wait("rljob", "digits", finished, PATIENCE_SECONDS)
    assert holds("Complete")(job), status(job)
    assert status(job)["step"] == 60
    assert status(job)["reward"] > 0.9
    assert len(status(job)["attempts"]) == 1
    assert jobs.get("pod", "digits-controller")["metadata"]["uid"] == controller["metadata"]["uid"]
    assert event_reasons(jobs, "digits")[-1] == "JobCompleted"
    listed = jobs("get", "rljobs")
    assert "Complete" in listed
    assert "60/60" in listed


def test_a_deleted_worker_and_a_drained_node_cost_no_step(
    jobs: Kubectl, cluster: ClusterLayout, kubectl: Kubectl
) -> None:
    steps = 150
    jobs.apply(digits(algorithm={"steps": steps}, policy={"gpusPerReplica": 0}))
    jobs.wait("rljob", "digits", holds("Scheduled"))
    jobs.wait("stepreport", "digits", at_step(20), PATIENCE_SECONDS)
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
    committed = [record["step"] for record in _ledger(jobs) if record["kind"] == "step"]
    assert committed == list(range(1, steps + 1))


def _ledger(kubectl: Kubectl) -> list[dict[str, object]]:
    """The job's ledger, read from the volume's folder on this machine."""
    claim = kubectl.get("pvc", "digits-checkpoints")
    volume = kubectl.get("pv", claim["spec"]["volumeName"])["spec"]
    folder = Path((volume.get("hostPath") or volume["local"])["path"])
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
