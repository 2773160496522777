"""Pods that cannot start are reported at once, and fail the job after a timeout."""

from __future__ import annotations

import pytest

from rljob_api.conditions import ConditionType
from rljob_api.status import Condition
from rljob_testing.simulated_cluster import CONTROLLER, POLICY_0, SimulatedCluster, job_spec


@pytest.mark.parametrize(
    "waiting",
    [
        'ErrImagePull: failed to pull image "nowhere/none:1": not found',
        'CreateContainerConfigError: secret "token" not found',
    ],
)
def test_a_pod_that_cannot_start_is_reported_then_fails_the_job(waiting: str) -> None:
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


def test_a_pod_that_waits_for_its_volume_is_named_with_the_place_of_its_events() -> None:
    cluster = SimulatedCluster()
    cluster.settle()
    cluster.place()
    cluster.start(CONTROLLER)
    cluster.tick(60)
    cluster.settle()
    running = cluster.condition(ConditionType.RUNNING)
    assert running.message == (
        "pod demo-policy-0 (and 1 more) has not started; for images and volumes, see kubectl describe pod demo-policy-0"
    )


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


@pytest.mark.parametrize("trainer", [None, {"image": "registry.example/verl:1"}])
def test_an_outage_of_the_registry_after_progress_is_a_counted_restart(trainer: dict[str, str] | None) -> None:
    cluster = SimulatedCluster(spec=job_spec() | ({"trainer": trainer} if trainer else {})).run()
    if trainer is None:
        cluster.reports(40)
    cluster.end(POLICY_0, 1)
    cluster.tick(20)
    cluster.settle()
    for _ in range(4):
        cluster.finish_deletions()
        cluster.settle()
    cluster.tick(400)
    cluster.settle()
    cluster.place()
    for name in cluster.pods:
        cluster.change_pod(name, waiting="ImagePullBackOff: registry: 503")
    cluster.tick(1801)
    cluster.settle()
    assert cluster.status is not None
    assert (cluster.phase, cluster.status.restarts) == ("Recovering", 2)
    assert "ImagePullBackOff: registry: 503" in cluster.condition(ConditionType.RECOVERING).message
    for _ in range(3):
        cluster.finish_deletions()
        cluster.settle()
    assert cluster.last.requeue_after_seconds, "the next attempt is delayed"
    cluster.next_attempt_runs()
    assert (cluster.phase, cluster.attempt.number) == ("Running", 3)


def test_an_object_left_behind_is_reported_after_a_minute_with_advice() -> None:
    left = "StepReport demo belongs to a deleted job of this name; waiting for its garbage collection"
    cluster = SimulatedCluster()
    cluster.round()
    cluster.facts = {"left_behind": left}

    def waited(seconds: float) -> Condition:
        cluster.tick(seconds)
        for _ in range(3):
            cluster.round()
            cluster.pods.clear()  # they cannot be created before the other objects
        return cluster.condition(ConditionType.SCHEDULED)

    assert (waited(30).reason, waited(29).message) == ("WaitingForPods", left)
    assert "ObjectLeftBehind" not in cluster.events
    scheduled = waited(1)
    assert scheduled.reason == "ObjectLeftBehind"
    assert scheduled.message.startswith(left)
    assert "finalizers" in scheduled.message
    assert cluster.events.count("ObjectLeftBehind") == 1
