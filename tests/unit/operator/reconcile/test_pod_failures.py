"""Pods around the trainer: init containers, sidecars, limits, other trainers, a cluster that keeps failing."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.conditions import ConditionType
from rljob_operator.observe.pod_facts import observed_pod
from rljob_testing.simulated_cluster import CONTROLLER, POLICY_0, POLICY_1, SimulatedCluster, created_job, running_job
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
PREEMPTED = {
    "phase": "Failed",
    "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "Preempted"}],
}
MESH = ("istio-proxy",)
WORKERS = {POLICY_0, POLICY_1}
OTHER_TRAINER: dict[str, Any] = {"trainer": {"image": "registry.example/other:1"}}


def kubelet_reports(cluster: SimulatedCluster, name: str, status: dict[str, Any]) -> SimulatedCluster:
    """Put the state of a pod with this status on the pod `name`."""
    found = observed_pod(pod(status=status))
    states = ("phase", "started", "end", "failed_init_container", "failed_sidecar", "evicted", "disruption")
    return cluster.change_pod(name, **{state: getattr(found, state) for state in states})


def fail_all_attempts(cluster: SimulatedCluster, status: dict[str, Any], most: int = 30) -> SimulatedCluster:
    """Let POLICY_0 of each attempt fail in this way until the job has failed."""
    for _ in range(most):
        kubelet_reports(cluster, POLICY_0, status).settle()
        if cluster.phase == "Failed":
            return cluster
        cluster.stop().tick(400).settled().place()
    raise AssertionError(f"the job has not failed after {most} attempts: {cluster.attempt}")


FETCH = "init container fetch-data of pod demo-policy-0 exited with code 1: no such bucket"
FULL = (
    'pod demo-policy-0 was evicted: Usage of EmptyDir volume "tmp" exceeds',
    "raise that limit in spec.policy.template",
)


@pytest.mark.parametrize(
    ("status", "reason", "message", "exit_code"),
    [(INIT_FAILED, "InitContainerFailed", FETCH, None), (EVICTED, "Evicted", FULL, 137)],
)
def test_a_failure_of_the_pods_own_is_a_counted_restart(
    status: dict[str, Any], reason: str, message: Any, exit_code: int | None
) -> None:
    """`exit_code`: of the trainer, if it ran."""
    cluster = kubelet_reports(created_job().place(), POLICY_0, status)
    cluster.round()
    cluster.expect(reason=reason, message_contains=message, exit_code=exit_code)
    fail_all_attempts(cluster, status).expect(failed="RestartsExhausted", number=4)


def test_an_init_container_of_a_preempted_pod_is_not_the_cause() -> None:
    cluster = kubelet_reports(created_job().place(), POLICY_0, INIT_FAILED)
    cluster.change_pod(POLICY_0, disruption="PreemptionByScheduler").round()
    cluster.expect(reason="PodsDisrupted")


def test_a_failed_sidecar_that_keeps_a_pod_from_being_ready_is_named() -> None:
    cluster = kubelet_reports(created_job().place().start(), POLICY_1, SIDECAR_FAILED)
    message = "container logger of pod demo-policy-1 exited with code 3"
    cluster.tick(60).settled(running=(False, "Starting"))
    cluster.expect(running_contains=(message, "kubectl logs demo-policy-1 -c logger has more"))


@pytest.mark.parametrize("spec", [{}, OTHER_TRAINER])
def test_attempts_that_the_cluster_ends_without_a_step_are_limited(spec: dict[str, Any]) -> None:
    cluster = running_job(**spec, recovery={"maxRestarts": 0})
    message = ("20 attempts in a row ended before a step was committed", "was removed by the cluster (Preempted)")
    fail_all_attempts(cluster, PREEMPTED).expect(failed="NoProgress", number=20, failed_contains=message)


def test_progress_between_disruptions_keeps_a_job_alive() -> None:
    cluster = running_job()
    for step in range(1, 41):
        if step % 15 == 0:
            cluster.reports(step)
        cluster.change_pod(CONTROLLER, disruption="PreemptionByScheduler", phase="Failed").next_attempt_runs()
    cluster.expect(phase="Running", number=41)


# --- another trainer: no controller, complete when every pod is ---


def test_another_trainer_completes_with_all_pods_and_keeps_their_logs() -> None:
    cluster = running_job(**OTHER_TRAINER).expect(phase="Running", pods=WORKERS)
    cluster.end(POLICY_0, 0).settled(phase="Running").tick(3600).settled(phase="Running")
    cluster.end(POLICY_1, 0).settled(phase="Complete", pods=WORKERS)


def test_a_suspended_job_of_another_trainer_stops_all_pods_at_once() -> None:
    running_job(**OTHER_TRAINER).change_spec(suspend=True).settled(deleting=WORKERS)


@pytest.mark.parametrize("code", [2, 84, 143])
def test_exit_codes_of_another_trainer_have_no_meaning_of_rljobs(code: int) -> None:
    cluster = running_job(**OTHER_TRAINER).end(POLICY_1, code, text="CUDA error")
    cluster.settled(reason="Error", exit_code=code, restarts=1, recovering=True, recovering_contains="CUDA error")
    cluster.expect(message_contains=f"pod demo-policy-1 exited with code {code} (Error): CUDA error")
    cluster.next_attempt_runs().expect(phase="Running", number=2)


def test_a_termination_message_of_another_trainer_has_rljobs_meaning() -> None:
    cluster = running_job(**OTHER_TRAINER).end(POLICY_1, 84, message="the data set is empty")
    cluster.settled(failed="BadInput", failed_contains="the data set is empty")


# --- sidecars that keep running, as a service mesh injects them ---


def outcome(cluster: SimulatedCluster) -> tuple[Any, ...]:
    """Everything that a sidecar must not change."""
    cluster.tick(21).settled().finish_deletions().settled()  # after the grace of other pods
    status, attempt = cluster.stored, cluster.stored.attempts[0]  # a changed plan starts the next one at once
    holds = {type_.value: cluster.holds(type_) for type_ in ConditionType}
    return attempt.reason, attempt.message, attempt.exit_code, holds, status.restarts, status.adjustments


@pytest.mark.parametrize("spec", [{}, OTHER_TRAINER], ids=["own", "other"])
@pytest.mark.parametrize("exit_code", [0, 1, 137, 143, 80, 81, 83, 84])
def test_an_end_has_the_same_result_with_and_without_a_sidecar(exit_code: int, spec: dict[str, Any]) -> None:
    results = []
    for sidecars in ((), MESH):
        cluster = running_job(**spec)
        for name in list(cluster.pods) if "trainer" in spec else [CONTROLLER]:
            cluster.end(name, exit_code, reason="OOMKilled" if exit_code == 137 else "Error", sidecars=sidecars)
        results.append(outcome(cluster))
    assert results[0] == results[1]
    assert results[1][0] is not None


def test_a_lost_worker_with_a_sidecar_ends_the_attempt_after_the_grace() -> None:
    cluster = running_job().end(POLICY_0, 83, sidecars=MESH).settled(reason=None, running=(False, "Stopping"))
    ended = "the trainer has ended in demo-policy-0 (exit code 83)"
    cluster.expect(running_contains=(ended, "container istio-proxy of pod demo-policy-0 still runs"))
    cluster.tick(21).settled(reason="WorkerLost")


def test_pods_with_sidecars_are_deleted_before_the_next_attempt() -> None:
    running_job().end(CONTROLLER, 1, sidecars=MESH).settled(deleting={CONTROLLER, *WORKERS})
    cluster = running_job()
    for name in cluster.pods:
        cluster.end(name, 1, sidecars=MESH)
    cluster.settle()
    assert {pod.deletion_grace_seconds for pod in cluster.pods.values() if pod.deleting} == {20}
    cluster.expect(deleting={CONTROLLER, *WORKERS}).next_attempt_runs().expect(number=2, running=True)


@pytest.mark.parametrize("spec", [{}, OTHER_TRAINER], ids=["own", "other"])
def test_the_kept_pods_of_a_finished_job_go_if_a_sidecar_holds_them(spec: dict[str, Any]) -> None:
    cluster = running_job(**spec)
    names = set(cluster.pods) if "trainer" in spec else {CONTROLLER}
    for name in names:
        cluster.end(name, 0, sidecars=MESH)
    message = (f"container istio-proxy of pod {min(names)} still runs", "30 s after the end")
    cluster.settled(complete=True).tick(10).settled(running_contains=message, deleting=set(cluster.pods) - names)
    cluster.tick(20).settle()
    assert all(cluster.pods[name].deleting for name in names)
    cluster.finish_deletions().settled(pods=set(), running_contains=message)


def test_the_pod_of_a_finished_job_stays_once_its_sidecar_has_terminated() -> None:
    cluster = running_job().end(CONTROLLER, 0, sidecars=MESH).settled().tick(10).settled(running_contains="still runs")
    cluster.change_pod(CONTROLLER, phase="Succeeded", running_sidecars=()).tick(3600)
    cluster.stop().expect(pods={CONTROLLER}, running_contains="the job has ended")


def test_a_restart_in_place_is_no_end() -> None:
    cluster = running_job().change_pod(POLICY_0, restarts_in_place=True)
    assert not cluster.end(POLICY_0, 86, sidecars=MESH).pods[POLICY_0].ended
    assert cluster.end(POLICY_0, 1, sidecars=MESH).pods[POLICY_0].ended
