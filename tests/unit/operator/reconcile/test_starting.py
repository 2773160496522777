"""Pods that cannot start are told of at once, and end the job after a while."""

from __future__ import annotations

import pytest

from rljob_api.conditions import ConditionType
from rljob_testing.simulated_cluster import CONTROLLER, POLICY_0, SimulatedCluster


@pytest.mark.parametrize(
    "waiting",
    [
        'ErrImagePull: failed to pull image "nowhere/none:1": not found',
        'CreateContainerConfigError: secret "token" not found',
    ],
)
def test_a_pod_that_cannot_start_is_told_of_at_once_and_fails_the_job_after_the_timeout(waiting: str) -> None:
    cluster = SimulatedCluster()
    cluster.settle()
    cluster.place()
    cluster.start(CONTROLLER)
    cluster.change_pod(POLICY_0, waiting=waiting)
    cluster.round()
    running = cluster.condition(ConditionType.RUNNING)
    assert (running.reason, running.message) == ("PodCannotStart", f"pod demo-policy-0 cannot start: {waiting}")
    cluster.tick(1800)
    cluster.settle()
    failed = cluster.condition(ConditionType.FAILED)
    assert failed.reason == "PodCannotStart"
    assert waiting in failed.message


def test_an_image_name_that_is_none_fails_the_job_at_once() -> None:
    cluster = SimulatedCluster()
    cluster.settle()
    cluster.place()
    cluster.change_pod(CONTROLLER, waiting='InvalidImageName: couldn\'t parse image name "UPPER": invalid reference')
    cluster.settle()
    assert cluster.phase == "Failed"
    assert "InvalidImageName" in cluster.condition(ConditionType.FAILED).message


def test_a_claim_that_does_not_exist_fails_the_job_after_the_timeout() -> None:
    cluster = SimulatedCluster()
    cluster.settle()
    text = '0/2 nodes are available: persistentvolumeclaim "data" not found.'
    cluster.unschedulable(text, CONTROLLER, POLICY_0)
    assert cluster.settle().requeue_after_seconds == 1800
    assert text in cluster.condition(ConditionType.SCHEDULED).message
    cluster.tick(1800)
    cluster.settle()
    assert text in cluster.condition(ConditionType.FAILED).message


def test_a_job_that_waits_for_room_waits_as_long_as_it_takes() -> None:
    cluster = SimulatedCluster()
    cluster.settle()
    cluster.unschedulable("0/2 nodes are available: 2 Insufficient cpu.", *cluster.pods)
    cluster.settle()
    cluster.tick(1_000_000)
    cluster.settle()
    assert cluster.phase == "Pending"
    assert len(cluster.pods) == 3


def test_pods_that_run_are_not_timed() -> None:
    cluster = SimulatedCluster()
    cluster.settle()
    cluster.place()
    cluster.start()
    cluster.tick(100_000)
    cluster.settle()
    assert cluster.phase == "Pending"
    assert not any(pod.deleting for pod in cluster.pods.values())
