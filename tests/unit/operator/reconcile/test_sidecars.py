"""Sidecars that keep running, as a service mesh injects them: the container `rljob` decides, not the pod's phase."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.conditions import ConditionType
from rljob_api.exit_codes import ExitCode
from rljob_testing.simulated_cluster import CONTROLLER, POLICY_0, POLICY_1, SimulatedCluster, job_spec

MESH = ("istio-proxy",)
OTHER_TRAINER = job_spec(trainer={"image": "registry.example/other:1"})
ENDS: list[Any] = [
    (0, "Completed"),
    (1, "Error"),
    (2, "Error"),
    (137, "OOMKilled"),
    (143, "Error"),
    *((code, "Error") for code in (80, 81, 82, 83, 84, 85)),
]


def outcome(cluster: SimulatedCluster) -> tuple[Any, ...]:
    """Everything that a sidecar must not change."""
    cluster.tick(21)  # the grace of other pods
    cluster.settle()
    cluster.finish_deletions()
    cluster.settle()
    status = cluster.status
    assert status is not None
    attempt = status.attempts[0]  # a changed plan starts the next one at once
    holds = {type_.value: cluster.holds(type_) for type_ in ConditionType}
    return attempt.reason, attempt.message, attempt.exit_code, holds, status.restarts, status.adjustments


@pytest.mark.parametrize("spec", [job_spec(), OTHER_TRAINER], ids=["own", "other"])
@pytest.mark.parametrize(("exit_code", "reason"), ENDS)
def test_an_end_has_the_same_result_with_and_without_a_sidecar(
    exit_code: int, reason: str, spec: dict[str, Any]
) -> None:
    results = []
    for sidecars in ((), MESH):
        cluster = SimulatedCluster(spec=spec).run()
        for name in list(cluster.pods) if "trainer" in spec else [CONTROLLER]:
            cluster.end(name, exit_code, reason=reason, sidecars=sidecars)
        results.append(outcome(cluster))
    assert results[0] == results[1]
    assert results[1][0] is not None


@pytest.mark.parametrize("sidecars", [(), MESH])
def test_a_lost_worker_ends_the_attempt_after_the_controllers_grace(sidecars: tuple[str, ...]) -> None:
    cluster = SimulatedCluster().run()
    cluster.end(POLICY_0, 83, sidecars=sidecars)
    cluster.settle()
    assert cluster.attempt.reason is None
    running = cluster.condition(ConditionType.RUNNING)
    kept = "; container istio-proxy of pod demo-policy-0 still runs" if sidecars else ""
    assert (running.status, running.reason) == ("False", "Stopping")
    assert running.message == (
        f"the trainer has ended in demo-policy-0 (exit code 83); waiting for the other pods{kept}"
    )
    cluster.tick(21)
    cluster.settle()
    assert cluster.attempt.reason == "WorkerLost"


def test_pods_with_sidecars_are_deleted_before_the_next_attempt() -> None:
    cluster = SimulatedCluster().run()
    for name in list(cluster.pods):
        cluster.end(name, 1, sidecars=MESH)
    cluster.settle()
    grace = {pod.name: pod.deletion_grace_seconds for pod in cluster.pods.values() if pod.deleting}
    assert grace == dict.fromkeys((CONTROLLER, POLICY_0, POLICY_1), 20)
    cluster.next_attempt_runs()
    assert cluster.attempt.number == 2
    assert cluster.holds(ConditionType.RUNNING)


@pytest.mark.parametrize("spec", [job_spec(), OTHER_TRAINER], ids=["own", "other"])
def test_the_kept_pods_of_a_finished_job_go_if_a_sidecar_holds_them(spec: dict[str, Any]) -> None:
    cluster = SimulatedCluster(spec=spec).run()
    names = list(cluster.pods) if "trainer" in spec else [CONTROLLER]
    for name in names:
        cluster.end(name, 0, sidecars=MESH)
    cluster.settle()
    assert cluster.holds(ConditionType.COMPLETE)
    cluster.tick(10)
    cluster.settle()
    assert not any(cluster.pods[name].deleting for name in names)
    message = cluster.condition(ConditionType.RUNNING).message
    assert f"container istio-proxy of pod {names[0]} still runs" in message
    assert "30 s after the end" in message

    cluster.tick(20)
    cluster.settle()
    assert all(cluster.pods[name].deleting for name in names)
    cluster.finish_deletions()
    cluster.settle()
    assert not cluster.pods
    assert cluster.condition(ConditionType.RUNNING).message == message


def test_the_pod_of_a_finished_job_stays_once_its_sidecar_has_terminated() -> None:
    cluster = SimulatedCluster().run()
    cluster.end(CONTROLLER, 0, sidecars=MESH)
    cluster.settle()
    cluster.tick(10)
    cluster.settle()
    assert "still runs" in cluster.condition(ConditionType.RUNNING).message
    cluster.change_pod(CONTROLLER, phase="Succeeded", running_sidecars=())
    cluster.tick(3600)
    cluster.settle()
    cluster.finish_deletions()
    assert list(cluster.pods) == [CONTROLLER]
    assert cluster.condition(ConditionType.RUNNING).message == "the job has ended"


def test_a_sidecar_does_not_keep_the_workers_of_a_controller_that_ended() -> None:
    cluster = SimulatedCluster().run()
    cluster.end(CONTROLLER, 1, sidecars=MESH)
    cluster.round()
    cluster.round()
    assert {pod.name for pod in cluster.pods.values() if pod.deleting} == {CONTROLLER, POLICY_0, POLICY_1}


def test_a_restart_in_place_is_no_end() -> None:
    cluster = SimulatedCluster().run()
    cluster.change_pod(POLICY_0, restarts_in_place=True)
    cluster.end(POLICY_0, ExitCode.RESTART_IN_PLACE, sidecars=MESH)
    assert not cluster.pods[POLICY_0].ended
    cluster.end(POLICY_0, 1, sidecars=MESH)
    assert cluster.pods[POLICY_0].ended
