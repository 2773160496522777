"""The controller goes first and has time to commit its step; not for long where the workers it needs are no more."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rljob_operator.reconcile.pod_deletion import WITHOUT_WORKERS_SECONDS
from rljob_testing.simulated_cluster import CONTROLLER, POLICY_0, SETTINGS, SimulatedCluster


def grace_of_controller(cluster: SimulatedCluster) -> int | None:
    cluster.settle()
    return cluster.pods[CONTROLLER].deletion_grace_seconds


def test_a_controller_with_all_its_workers_has_the_time_of_its_pod() -> None:
    cluster = SimulatedCluster().run()
    cluster.change_spec(suspend=True)
    assert grace_of_controller(cluster) == SETTINGS.termination_grace_seconds


@pytest.mark.parametrize("lost", [SimulatedCluster.vanish, lambda cluster, name: cluster.end(name, 137)])
def test_an_ending_controller_gets_a_moment_after_a_lost_worker(
    lost: Callable[[SimulatedCluster, str], None],
) -> None:
    cluster = SimulatedCluster().run()
    cluster.delete_pod(CONTROLLER)
    assert grace_of_controller(cluster) == SETTINGS.termination_grace_seconds
    lost(cluster, POLICY_0)
    assert grace_of_controller(cluster) == WITHOUT_WORKERS_SECONDS


def test_a_worker_that_vanishes_is_not_waited_for_by_its_controller() -> None:
    cluster = SimulatedCluster().run()
    cluster.vanish(POLICY_0)
    assert grace_of_controller(cluster) == WITHOUT_WORKERS_SECONDS
    assert cluster.attempt.reason == "PodsDisrupted"


def test_a_shorter_time_that_somebody_gave_stays() -> None:
    cluster = SimulatedCluster().run()
    cluster.delete_pod(CONTROLLER, grace_seconds=5)
    cluster.vanish(POLICY_0)
    assert grace_of_controller(cluster) == 5


def test_a_shorter_time_of_the_pod_stays() -> None:
    cluster = SimulatedCluster(settings=SETTINGS.model_copy(update={"termination_grace_seconds": 5})).run()
    cluster.vanish(POLICY_0)
    assert grace_of_controller(cluster) == 5
