"""A policy that runs out of memory gets more pods; if no node has room for them, the job reports it."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.attempt_settings import AttemptSettings
from rljob_api.conditions import ConditionType
from rljob_api.exit_codes import ExitCode
from rljob_api.job import RLJob
from rljob_operator.reconcile.observed import ObservedNode
from rljob_testing.simulated_cluster import CONTROLLER, CPU_NODE, PLAN, POLICY_0, SimulatedCluster, job_spec
from tests.unit.operator.reconcile.memory_failures import FACTS, KNOWING, evidence, running, status_of

NO_SETTING_LEFT = {"maxAdjustments": 0}
STATE = {"class": "OptimizerState", "confidence": 0.9, "message": "the optimizer's state does not fit"}


def job(most: int = 4, **spec: Any) -> SimulatedCluster:
    """One policy pod that may grow, and no change of a setting is allowed."""
    return running(**{"policy": {"replicas": 1}, "recovery": NO_SETTING_LEFT | {"maxGpus": most}, **spec})


def out_of_memory(cluster: SimulatedCluster, step: int = 3) -> None:
    words = evidence(cluster, attempt=cluster.attempt.number, step=step + 1, rank=0, diagnoses=[STATE])
    cluster.end(CONTROLLER, ExitCode.DEVICE_OUT_OF_MEMORY, sentence="policy-0 ran out", step=step, evidence=words)


def policy_pods(cluster: SimulatedCluster) -> list[str]:
    return sorted(pod.name for pod in cluster.pods.values() if pod.role == "policy")


def test_the_policy_grows_until_it_has_all_gpus_that_it_may_have() -> None:
    cluster = job()
    assert policy_pods(cluster) == [POLICY_0]
    for pods in (2, 4):
        cluster.events.clear()
        out_of_memory(cluster)
        cluster.next_attempt_runs()
        assert len(policy_pods(cluster)) == pods
        assert cluster.phase == "Running"
        assert cluster.events == ["OutOfMemory", "PlanChanged", "AttemptStarted"]
        plan, change = status_of(cluster).plan, status_of(cluster).plan_changes[-1]
        assert plan is not None
        assert (plan.policy_gpus, change.remedy.after, change.level) == (pods, str(pods), "ReplacePods")
        assert [(of.role, of.desired) for of in status_of(cluster).pods] == [("controller", 1), ("policy", pods)]
    assert status_of(cluster).adjustments == 0
    out_of_memory(cluster)
    cluster.settle()
    failed = cluster.condition(ConditionType.FAILED)
    assert failed.reason == "AdjustmentsExhausted"
    assert "recovery.maxGpus is 4, and the policy has 4 GPUs" in failed.message


def created_after_growth(cluster: SimulatedCluster) -> dict[str, dict[str, Any]]:
    """Objects that the operator writes from an out-of-memory failure on, by kind and name."""
    out_of_memory(cluster)
    written: dict[str, dict[str, Any]] = {}
    for _ in range(12):
        desired = cluster.round()
        for manifest in (*desired.apply, *desired.create):
            written[f"{manifest['kind']}/{manifest['metadata']['name']}"] = manifest
        cluster.finish_deletions()
    return written


def test_pods_learn_of_the_growth_by_the_plan_and_the_manifest_stays() -> None:
    written = created_after_growth(job())
    (settings,) = (manifest for name, manifest in written.items() if name.startswith("ConfigMap/"))
    texts = list(settings["data"].values())
    plans = [AttemptSettings.model_validate_json(text).memory_plan for text in texts if '"memoryPlan"' in text]
    assert [plan.policy_gpus for plan in plans if plan] == [2]
    (manifest,) = (text for text in texts if '"RLJob"' in text)
    assert RLJob.model_validate_json(manifest).spec.policy.replicas == 1
    worker = written["Pod/demo-policy-1"]["spec"]["containers"][0]
    assert {"name": "RLJOB_WORKERS", "value": "2"} in worker["env"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_a_queue_gets_the_whole_group() -> None:
    spec = job_spec(policy={"replicas": 1}, queueName="gpus", recovery=NO_SETTING_LEFT | {"maxGpus": 2})
    cluster = SimulatedCluster(spec=spec, facts={"kueue_installed": True}).run()
    cluster.reports(3, memory_profile=FACTS, phase="update")
    cluster.settle()
    written = created_after_growth(cluster)
    pods = [manifest for name, manifest in written.items() if name.startswith("Pod/")]
    assert [pod["metadata"]["annotations"]["kueue.x-k8s.io/pod-group-total-count"] for pod in pods] == ["3"] * 3
    waiting = cluster.condition(ConditionType.SCHEDULED)
    assert waiting.reason == "WaitingForQueue"
    assert "the policy has grown from 1 to 2 GPUs" in waiting.message


def test_a_waiting_controller_is_not_restarted_in_pods_that_are_too_few() -> None:
    cluster = SimulatedCluster(
        spec=job_spec(policy={"replicas": 1}, recovery=NO_SETTING_LEFT | {"maxGpus": 2}), nodes=KNOWING
    ).run()
    words = evidence(cluster, time=cluster.now, rank=0, diagnoses=[STATE])
    pending = {"exitCode": 80, "message": "policy-0 ran out"}
    cluster.reports(3, plan=PLAN, last_evidence=words, pending_exit=pending)
    cluster.next_attempt_runs()
    assert policy_pods(cluster) == ["demo-policy-0", "demo-policy-1"]
    assert cluster.attempt.pods_of_attempt is None


def test_engines_with_pods_of_their_own_stay_as_they_are() -> None:
    cluster = job(topology="Disaggregated", rollout={"replicas": 1})
    out_of_memory(cluster)
    cluster.next_attempt_runs()
    assert policy_pods(cluster) == ["demo-policy-0", "demo-policy-1"]
    assert [pod.name for pod in cluster.pods.values() if pod.role == "rollout"] == ["demo-rollout-0"]


def test_a_cluster_without_so_many_gpus_is_named() -> None:
    cluster = job(most=16)
    cluster.nodes = (CPU_NODE, ObservedNode("gpu-node", gpus=1, usable=True))
    out_of_memory(cluster)
    for _ in range(4):
        cluster.finish_deletions()
        cluster.settle()
    cluster.unschedulable("0/2 nodes are available", "demo-policy-1")
    cluster.settle()
    waiting = cluster.condition(ConditionType.SCHEDULED)
    assert (waiting.status, waiting.reason) == ("False", "Unschedulable")
    assert "the job requests 2 nvidia.com/gpu, but all usable nodes together have 1: add nodes" in waiting.message
    assert "the policy has grown from 1 to 2 GPUs because it ran out of memory" in waiting.message


def test_a_quota_that_refuses_the_grown_policy_comes_with_the_way_back() -> None:
    cluster = job()
    out_of_memory(cluster)
    cluster.settle()
    cluster.finish_deletions()
    cluster.facts = {"refused": "exceeded quota: gpus"}
    cluster.settle()
    refused = cluster.condition(ConditionType.SCHEDULED)
    assert refused.reason == "PodsRefused"
    assert "exceeded quota: gpus; the policy has grown from 1 to 2 GPUs" in refused.message
    cluster.facts = {}
    cluster.change_spec(suspend=True)
    cluster.settle()
    cluster.change_spec(suspend=False, recovery=NO_SETTING_LEFT)
    cluster.next_attempt_runs()
    assert policy_pods(cluster) == [POLICY_0]


@pytest.mark.parametrize("recovery", [{}, {"maxGpus": 2}])
def test_a_lower_limit_shrinks_the_policy_in_the_next_attempt(recovery: dict[str, int]) -> None:
    cluster = job()
    for _ in range(2):
        out_of_memory(cluster)
        cluster.next_attempt_runs()
    assert len(policy_pods(cluster)) == 4
    cluster.change_spec(recovery=NO_SETTING_LEFT | recovery)
    assert len(policy_pods(cluster)) == 4, "the running attempt keeps its pods"
    cluster.settle()
    assert cluster.phase == "Running"
    cluster.delete_pod(POLICY_0)
    cluster.next_attempt_runs()
    assert policy_pods(cluster) == [POLICY_0]
