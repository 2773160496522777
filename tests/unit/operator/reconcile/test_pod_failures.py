"""Pods around the trainer: init containers, sidecars, limits, other trainers, a cluster that keeps failing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rljob_api.conditions import ConditionType
from rljob_operator.observe.pod_facts import observed_pod
from rljob_testing.simulated_cluster import (
    CONTROLLER,
    POLICY_0,
    POLICY_1,
    SimulatedCluster,
    created_job,
    job_spec,
    running_job,
)
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
OTHER_TRAINER = job_spec(trainer={"image": "registry.example/other:1"})


def kubelet_reports(cluster: SimulatedCluster, name: str, status: dict[str, Any]) -> None:
    """Put the state of a pod with this status on the pod `name`."""
    found = observed_pod(pod(status=status))
    assert found is not None
    states = ("phase", "started", "end", "failed_init_container", "failed_sidecar", "evicted", "disruption")
    cluster.pods[name] = replace(cluster.pods[name], **{state: getattr(found, state) for state in states})


def placed() -> SimulatedCluster:
    cluster = created_job().place()
    return cluster


def fail_all_attempts(cluster: SimulatedCluster, status: dict[str, Any], most: int = 30) -> None:
    """Let POLICY_0 of each attempt fail in this way until the job has failed."""
    for _ in range(most):
        kubelet_reports(cluster, POLICY_0, status)
        cluster.settled()
        if cluster.phase == "Failed":
            return
        cluster.stop().tick(400).settled().place()
    raise AssertionError(f"the job has not failed after {most} attempts: {cluster.attempt}")


def test_a_failed_init_container_is_a_counted_restart_that_names_it() -> None:
    cluster = placed()
    kubelet_reports(cluster, POLICY_0, INIT_FAILED)
    cluster.round()
    cluster.expect(reason="InitContainerFailed", exit_code=None)
    cluster.expect(message="init container fetch-data of pod demo-policy-0 exited with code 1: no such bucket")
    fail_all_attempts(cluster, INIT_FAILED)
    cluster.expect(failed="RestartsExhausted", number=4, failed_says="no such bucket")


def test_an_init_container_of_a_preempted_pod_is_not_the_cause() -> None:
    cluster = placed()
    kubelet_reports(cluster, POLICY_0, INIT_FAILED)
    cluster.change_pod(POLICY_0, disruption="PreemptionByScheduler")
    cluster.round()
    cluster.expect(reason="PodsDisrupted")


def test_an_eviction_for_a_limit_of_the_pod_is_counted() -> None:
    cluster = running_job()
    kubelet_reports(cluster, POLICY_0, EVICTED)
    cluster.round()
    cluster.expect(
        reason="Evicted", message_says='pod demo-policy-0 was evicted: Usage of EmptyDir volume "tmp" exceeds'
    )
    cluster.expect(message_says="raise that limit in spec.policy.template")
    fail_all_attempts(cluster, EVICTED)
    cluster.expect(failed="RestartsExhausted")


def test_a_failed_sidecar_that_keeps_a_pod_from_being_ready_is_named() -> None:
    cluster = placed()
    cluster.start()
    kubelet_reports(cluster, POLICY_1, SIDECAR_FAILED)
    cluster.tick(60).settled(running="Starting")
    cluster.expect(running_says="container logger of pod demo-policy-1 exited with code 3")
    cluster.expect(running_says="kubectl logs demo-policy-1 -c logger has more", running=False)


@pytest.mark.parametrize("spec", [job_spec(), OTHER_TRAINER])
def test_attempts_that_the_cluster_ends_without_a_step_are_limited(spec: dict[str, Any]) -> None:
    cluster = SimulatedCluster(spec=spec | {"recovery": {"maxRestarts": 0}}).run()
    fail_all_attempts(cluster, PREEMPTED)
    cluster.expect(failed="NoProgress", number=20)
    cluster.expect(failed_says="20 attempts in a row ended before a step was committed")
    cluster.expect(failed_says="was removed by the cluster (Preempted)")


def test_progress_between_disruptions_keeps_a_job_alive() -> None:
    cluster = running_job()
    for step in range(1, 41):
        if step % 15 == 0:
            cluster.reports(step)
        cluster.change_pod(CONTROLLER, disruption="PreemptionByScheduler", phase="Failed").next_attempt_runs()
    cluster.expect(phase="Running", number=41)


# --- another trainer: no controller, complete when every pod is ---


def test_another_trainer_completes_with_all_pods_and_keeps_their_logs() -> None:
    cluster = SimulatedCluster(spec=OTHER_TRAINER).run()
    cluster.expect(phase="Running", pods={POLICY_0, POLICY_1})
    cluster.end(POLICY_0, 0).settled(phase="Running")
    cluster.tick(3600).settled(phase="Running")
    cluster.end(POLICY_1, 0).settled(phase="Complete", pods={POLICY_0, POLICY_1})


def test_a_suspended_job_of_another_trainer_stops_all_pods_at_once() -> None:
    cluster = SimulatedCluster(spec=OTHER_TRAINER).run()
    cluster.change_spec(suspend=True).settled(deleting={POLICY_0, POLICY_1})


@pytest.mark.parametrize("code", [2, 84, 143])
def test_exit_codes_of_another_trainer_have_no_meaning_of_rljobs(code: int) -> None:
    cluster = SimulatedCluster(spec=OTHER_TRAINER).run()
    cluster.end(POLICY_1, code, text="CUDA error")
    cluster.settled(reason="Error", exit_code=code, restarts=1, recovering=True, recovering_says="CUDA error")
    cluster.expect(message_says=f"pod demo-policy-1 exited with code {code} (Error): CUDA error")
    cluster.next_attempt_runs().expect(phase="Running", number=2)


def test_a_termination_message_of_another_trainer_has_rljobs_meaning() -> None:
    cluster = SimulatedCluster(spec=OTHER_TRAINER).run()
    cluster.end(POLICY_1, 84, sentence="the data set is empty")
    cluster.settled(failed="BadInput", failed_says="the data set is empty")


# --- sidecars that keep running, as a service mesh injects them ---


def outcome(cluster: SimulatedCluster) -> tuple[Any, ...]:
    """Everything that a sidecar must not change."""
    cluster.tick(21)  # the grace of other pods
    cluster.settled().finish_deletions()
    cluster.settled()
    attempt = cluster.stored.attempts[0]  # a changed plan starts the next one at once
    holds = {type_.value: cluster.holds(type_) for type_ in ConditionType}
    return (
        attempt.reason,
        attempt.message,
        attempt.exit_code,
        holds,
        cluster.stored.restarts,
        cluster.stored.adjustments,
    )


@pytest.mark.parametrize("spec", [job_spec(), OTHER_TRAINER], ids=["own", "other"])
@pytest.mark.parametrize("exit_code", [0, 1, 137, 143, 80, 81, 83, 84])
def test_an_end_has_the_same_result_with_and_without_a_sidecar(exit_code: int, spec: dict[str, Any]) -> None:
    results = []
    for sidecars in ((), MESH):
        cluster = SimulatedCluster(spec=spec).run()
        for name in list(cluster.pods) if "trainer" in spec else [CONTROLLER]:
            cluster.end(name, exit_code, reason="OOMKilled" if exit_code == 137 else "Error", sidecars=sidecars)
        results.append(outcome(cluster))
    assert results[0] == results[1]
    assert results[1][0] is not None


@pytest.mark.parametrize("sidecars", [(), MESH])
def test_a_lost_worker_ends_the_attempt_after_the_controllers_grace(sidecars: tuple[str, ...]) -> None:
    cluster = running_job().end(POLICY_0, 83, sidecars=sidecars).settled(reason=None, running="Stopping")
    cluster.expect(running_says="the trainer has ended in demo-policy-0 (exit code 83)", running=False)
    if sidecars:
        cluster.expect(running_says="container istio-proxy of pod demo-policy-0 still runs")
    cluster.tick(21).settled(reason="WorkerLost")


def test_pods_with_sidecars_are_deleted_before_the_next_attempt() -> None:
    cluster = running_job()
    for name in list(cluster.pods):
        cluster.end(name, 1, sidecars=MESH)
    cluster.settled()
    grace = {pod.name: pod.deletion_grace_seconds for pod in cluster.pods.values() if pod.deleting}
    assert grace == dict.fromkeys((CONTROLLER, POLICY_0, POLICY_1), 20)
    cluster.next_attempt_runs().expect(number=2, running=True)


def test_a_sidecar_does_not_keep_the_workers_of_a_controller_that_ended() -> None:
    cluster = running_job().end(CONTROLLER, 1, sidecars=MESH)
    cluster.round()
    cluster.round()
    cluster.expect(deleting={CONTROLLER, POLICY_0, POLICY_1})


@pytest.mark.parametrize("spec", [job_spec(), OTHER_TRAINER], ids=["own", "other"])
def test_the_kept_pods_of_a_finished_job_go_if_a_sidecar_holds_them(spec: dict[str, Any]) -> None:
    cluster = SimulatedCluster(spec=spec).run()
    names = set(cluster.pods) if "trainer" in spec else {CONTROLLER}
    for name in names:
        cluster.end(name, 0, sidecars=MESH)
    cluster.settled(complete=True)
    cluster.tick(10).settled(running_says=f"container istio-proxy of pod {min(names)} still runs")
    cluster.expect(running_says="30 s after the end", deleting=set(cluster.pods) - names)
    message = cluster.condition(ConditionType.RUNNING).message
    cluster.tick(20).settled()
    assert all(cluster.pods[name].deleting for name in names)
    cluster.finish_deletions().settled(pods=set(), running_says=message)


def test_the_pod_of_a_finished_job_stays_once_its_sidecar_has_terminated() -> None:
    cluster = running_job().end(CONTROLLER, 0, sidecars=MESH).settled().tick(10)
    cluster.settled(running_says="still runs")
    cluster.change_pod(CONTROLLER, phase="Succeeded", running_sidecars=()).tick(3600).stop()
    cluster.expect(pods={CONTROLLER}, running_says="the job has ended")


def test_a_restart_in_place_is_no_end() -> None:
    cluster = running_job().change_pod(POLICY_0, restarts_in_place=True).end(POLICY_0, 86, sidecars=MESH)
    assert not cluster.pods[POLICY_0].ended
    cluster.end(POLICY_0, 1, sidecars=MESH)
    assert cluster.pods[POLICY_0].ended
