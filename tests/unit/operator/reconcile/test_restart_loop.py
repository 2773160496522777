"""Pods that start anew in place again and again, though nobody asked for it, are not let go on for ever."""

from __future__ import annotations

from rljob_api.conditions import ConditionType
from rljob_operator.reconcile.restart_in_place import MAX_RESTARTS_IN_PLACE
from rljob_testing.simulated_cluster import CONTROLLER, POLICY_0, SimulatedCluster, job_spec
from tests.unit.operator.reconcile.memory_failures import FACTS, KNOWING, PENDING, evidence, status_of, waiting


def restarted(cluster: SimulatedCluster, times: int) -> None:
    for _ in range(times):
        cluster.restart(POLICY_0)


def test_a_pod_without_its_new_environment_is_replaced_and_counted() -> None:
    cluster = waiting()
    cluster.settle()
    cluster.restart()
    restarted(cluster, MAX_RESTARTS_IN_PLACE - 1)
    cluster.settle()
    assert (cluster.attempt.number, cluster.attempt.reason) == (2, None), "its node may be slow"
    cluster.restart(POLICY_0)
    cluster.settle()
    assert (cluster.attempt.reason, cluster.attempt.exit_code) == ("RestartLoop", 86)
    assert (status_of(cluster).restarts, status_of(cluster).adjustments) == (1, 1)
    recovering = cluster.condition(ConditionType.RECOVERING).message
    assert recovering.startswith(
        f"pod {POLICY_0} was restarted in place {MAX_RESTARTS_IN_PLACE + 1} times in this attempt, on"
    )
    assert cluster.pods[CONTROLLER].deleting
    cluster.next_attempt_runs()
    assert (cluster.attempt.number, cluster.attempt.pods_of_attempt, cluster.phase) == (3, None, "Running")


def test_restarts_of_earlier_attempts_are_not_counted() -> None:
    cluster = waiting()
    cluster.settle()
    cluster.restart()
    restarted(cluster, MAX_RESTARTS_IN_PLACE - 1)
    cluster.ready()
    words = evidence(cluster, time=cluster.now, attempt=2)
    cluster.reports(3, attempt=2, memory_profile=FACTS, last_evidence=words, pending_exit=PENDING)
    cluster.settle()
    assert (cluster.attempt.number, cluster.attempt.pods_of_attempt) == (3, 1)
    cluster.restart()
    cluster.ready()
    cluster.settle()
    assert (cluster.attempt.number, cluster.phase) == (3, "Running")


def test_an_operator_that_comes_back_after_hours_ends_the_loop_at_once() -> None:
    cluster = SimulatedCluster(nodes=KNOWING).run()
    cluster.reports(3)
    restarted(cluster, 4000)
    cluster.tick(3 * 3600)
    cluster.settle()
    assert cluster.attempt.reason == "RestartLoop"


def test_pods_in_a_restart_loop_exhaust_the_restarts() -> None:
    cluster = SimulatedCluster(spec=job_spec(recovery={"maxRestarts": 2}), nodes=KNOWING).run()
    for _ in range(3):
        restarted(cluster, MAX_RESTARTS_IN_PLACE + 1)
        cluster.settle()
        if cluster.phase != "Failed":
            cluster.next_attempt_runs()
    failed = cluster.condition(ConditionType.FAILED)
    assert failed.reason == "RestartsExhausted"
    assert "earlier attempts: 1: RestartLoop, 2: RestartLoop)." in failed.message


def test_pods_of_another_trainer_may_restart_as_their_own_containers_ask() -> None:
    spec = job_spec(trainer={"image": "registry.example/trl:1"})
    cluster = SimulatedCluster(spec=spec, nodes=KNOWING).run()
    restarted(cluster, MAX_RESTARTS_IN_PLACE + 1)
    cluster.settle()
    assert (cluster.attempt.number, cluster.phase) == (1, "Running")


def test_a_status_that_was_lost_is_no_loop() -> None:
    cluster = SimulatedCluster(nodes=KNOWING).run()
    restarted(cluster, MAX_RESTARTS_IN_PLACE + 1)
    cluster.set_status(None)
    cluster.settle()
    assert (cluster.attempt.number, cluster.attempt.reason) == (1, None)
