"""Failures around the trainer: of init containers, of sidecars, of limits of a pod, and of the cluster without end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rljob_api.conditions import ConditionType
from rljob_operator.observe.pod_facts import observed_pod
from rljob_testing.simulated_cluster import CONTROLLER, POLICY_0, POLICY_1, SimulatedCluster, job_spec
from tests.unit.operator.observe.objects import pod

INIT_FAILED = {
    "phase": "Failed",
    "initContainerStatuses": [
        {"name": "fetch-data", "state": {"terminated": {"exitCode": 1, "reason": "Error", "message": "no such bucket"}}}
    ],
    "containerStatuses": [{"name": "rljob", "state": {"waiting": {"reason": "PodInitializing"}}}],
}
EVICTED = {
    "phase": "Failed",
    "reason": "Evicted",
    "message": 'Usage of EmptyDir volume "tmp" exceeds the limit "1Gi". ',
    "containerStatuses": [{"name": "rljob", "state": {"terminated": {"exitCode": 137, "reason": "Error"}}}],
}
SIDECAR_FAILED = {
    "phase": "Running",
    "containerStatuses": [
        {"name": "rljob", "state": {"running": {}}},
        {"name": "logger", "state": {"terminated": {"exitCode": 3, "reason": "Error"}}},
    ],
}


def kubelet_reports(cluster: SimulatedCluster, name: str, status: dict[str, Any]) -> None:
    """Put the state of a pod with this status on the pod `name`."""
    found = observed_pod(pod(status=status))
    assert found is not None
    states = ("phase", "started", "end", "failed_init_container", "failed_sidecar", "evicted", "disruption")
    cluster.pods[name] = replace(cluster.pods[name], **{state: getattr(found, state) for state in states})


def fail_all_attempts(cluster: SimulatedCluster, status: dict[str, Any], most: int = 30) -> None:
    """Let POLICY_0 of each attempt fail in this way until the job has failed."""
    for _ in range(most):
        kubelet_reports(cluster, POLICY_0, status)
        cluster.settle()
        if cluster.phase == "Failed":
            return
        for _ in range(3):
            cluster.finish_deletions()
            cluster.settle()
        cluster.tick(400)
        cluster.settle()
        cluster.place()
    raise AssertionError(f"the job has not failed after {most} attempts: {cluster.attempt}")


def test_a_failed_init_container_is_a_counted_restart_that_names_it() -> None:
    cluster = SimulatedCluster()
    cluster.settle()
    cluster.place()
    kubelet_reports(cluster, POLICY_0, INIT_FAILED)
    cluster.round()
    assert cluster.attempt.reason == "InitContainerFailed"
    assert cluster.attempt.message == (
        "init container fetch-data of pod demo-policy-0 exited with code 1: no such bucket"
    )
    assert cluster.attempt.exit_code is None, "that of the trainer, which did not run"
    fail_all_attempts(cluster, INIT_FAILED)
    failed = cluster.condition(ConditionType.FAILED)
    assert (failed.reason, cluster.attempt.number) == ("RestartsExhausted", 4)
    assert "no such bucket" in failed.message


def test_an_init_container_of_a_preempted_pod_is_not_the_cause() -> None:
    cluster = SimulatedCluster()
    cluster.settle()
    cluster.place()
    kubelet_reports(cluster, POLICY_0, INIT_FAILED)
    cluster.change_pod(POLICY_0, disruption="PreemptionByScheduler")
    cluster.round()
    assert cluster.attempt.reason == "PodsDisrupted"


def test_an_eviction_for_a_limit_of_the_pod_is_counted() -> None:
    cluster = SimulatedCluster().run()
    kubelet_reports(cluster, POLICY_0, EVICTED)
    cluster.round()
    assert cluster.attempt.reason == "Evicted"
    assert cluster.attempt.message == (
        'pod demo-policy-0 was evicted: Usage of EmptyDir volume "tmp" exceeds the limit "1Gi"; '
        "raise that limit in spec.policy.template"
    )
    fail_all_attempts(cluster, EVICTED)
    assert cluster.condition(ConditionType.FAILED).reason == "RestartsExhausted"


def test_a_failed_sidecar_that_keeps_a_pod_from_being_ready_is_named() -> None:
    cluster = SimulatedCluster()
    cluster.settle()
    cluster.place()
    cluster.start()
    kubelet_reports(cluster, POLICY_1, SIDECAR_FAILED)
    cluster.tick(60)
    cluster.settle()
    running = cluster.condition(ConditionType.RUNNING)
    assert (running.status, running.reason) == ("False", "Starting")
    assert running.message == (
        "not all pods are ready: container logger of pod demo-policy-1 exited with code 3; "
        "kubectl logs demo-policy-1 -c logger has more"
    )


@pytest.mark.parametrize("trainer", [None, {"image": "registry.example/verl:1"}])
def test_attempts_that_the_cluster_ends_without_a_step_are_limited(trainer: dict[str, str] | None) -> None:
    spec = job_spec(recovery={"maxRestarts": 0}) | ({"trainer": trainer} if trainer else {})
    cluster = SimulatedCluster(spec=spec).run()
    preempted = {
        "phase": "Failed",
        "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "Preempted"}],
    }
    fail_all_attempts(cluster, preempted)
    failed = cluster.condition(ConditionType.FAILED)
    assert (failed.reason, cluster.attempt.number) == ("NoProgress", 20)
    assert failed.message.startswith("20 attempts in a row ended before a step was committed")
    assert "was removed by the cluster (Preempted)" in failed.message


def test_progress_between_disruptions_keeps_a_job_alive() -> None:
    cluster = SimulatedCluster().run()
    for step in range(1, 41):
        if step % 15 == 0:
            cluster.reports(step)
        cluster.change_pod(CONTROLLER, disruption="PreemptionByScheduler", phase="Failed")
        cluster.settle()
        cluster.finish_deletions()
        cluster.next_attempt_runs()
    assert (cluster.phase, cluster.attempt.number) == ("Running", 41)
