"""Suspending, resuming and deleting a job. The controller goes first, with time to commit its step."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_operator.reconcile.desired import Desired
from rljob_operator.reconcile.pod_deletion import WITHOUT_WORKERS_SECONDS
from rljob_testing.simulated_cluster import (
    CONTROLLER,
    POLICY_0,
    POLICY_1,
    SETTINGS,
    SimulatedCluster,
    job_spec,
    running_job,
)

NAMESPACED = SETTINGS.model_copy(update={"namespaces": ("team",)})


def suspended(**spec: Any) -> SimulatedCluster:
    cluster = running_job(**spec).change_spec(suspend=True).stop()
    return cluster


def test_a_job_that_is_created_suspended_has_no_pods() -> None:
    cluster = SimulatedCluster(spec=job_spec(suspend=True))
    assert cluster.settle() == Desired()
    cluster.expect(phase="Suspended", suspended="SuspendRequested", pods=set(), attempts=[], start_time=None)


def test_suspending_commits_the_step_and_resuming_is_no_restart() -> None:
    cluster = running_job().change_spec(suspend=True).settled(deleting={CONTROLLER}, suspended=False)
    cluster.reports(12).finish_deletions().settled(deleting={POLICY_0, POLICY_1})
    cluster.finish_deletions()
    assert cluster.settle() == Desired()
    cluster.expect(phase="Suspended", reason="SuspendRequested", to_step=12)
    assert cluster.events[-1] == "Suspended"
    cluster.change_spec(suspend=False)
    cluster.run().expect(phase="Running", number=2, from_step=13, restarts=0, suspended="Resumed")
    assert cluster.events[-2:] == ["Resumed", "AttemptStarted"]


def test_suspended_time_does_not_count_towards_the_deadline() -> None:
    cluster = suspended(activeDeadlineSeconds=3600)
    cluster.tick(100_000).settled(phase="Suspended")
    cluster.change_spec(suspend=False).run().expect(phase="Running")


def test_a_job_whose_last_step_is_committed_while_it_stops_is_complete() -> None:
    cluster = running_job().change_spec(suspend=True).settled()
    cluster.end(CONTROLLER, 0, sentence="all steps are committed", step=60).settled(phase="Complete")


@pytest.mark.parametrize("facts", [{}, {"problem": "spec.task: expected an object"}])
def test_deletion_ends_the_controller_then_workers_then_finalizer(facts: dict[str, Any]) -> None:
    cluster = running_job()
    cluster.facts = facts
    cluster.delete_job()
    for deleting in ({CONTROLLER}, {POLICY_0, POLICY_1}):
        cluster.settled(deleting=deleting)
        assert not cluster.gone
        cluster.finish_deletions()
    cluster.settled()
    assert cluster.gone


def test_a_job_that_is_deleted_before_it_started_goes_at_once() -> None:
    cluster = SimulatedCluster()
    cluster.round()
    cluster.delete_job().settled()
    assert cluster.gone


def test_in_a_namespace_that_is_being_deleted_nothing_is_made() -> None:
    cluster = SimulatedCluster(facts={"namespace_terminating": True})
    cluster.settled(pods=set(), scheduled="NamespaceTerminating")


def test_deletion_of_an_unadmitted_job_deletes_its_workload() -> None:
    cluster = SimulatedCluster(spec=job_spec(queueName="gpus"), facts={"kueue_installed": True})
    cluster.settled()
    for name in cluster.pods:
        cluster.change_pod(name, gated=True)
    assert cluster.round().delete_workloads == ()
    cluster.deleting = True
    for name in cluster.pods:
        cluster.change_pod(name, deleting=True)
    assert cluster.round().delete_workloads == ("demo-rljob-1",)


def test_a_job_of_a_listed_namespace_has_no_finalizer_and_goes_at_once() -> None:
    cluster = running_job()
    assert cluster.finalizer
    cluster.settings = NAMESPACED
    cluster.settled(phase="Running")
    assert not cluster.finalizer
    cluster.delete_job()
    assert cluster.gone


def test_a_deleted_job_of_a_listed_namespace_does_not_wait_for_its_pods() -> None:
    cluster = running_job()
    cluster.settings = NAMESPACED
    cluster.delete_job()
    cluster.round()
    assert cluster.gone


def suspend(cluster: SimulatedCluster) -> None:
    cluster.change_spec(suspend=True)


def lose_a_worker(cluster: SimulatedCluster) -> None:
    cluster.vanish(POLICY_0)


def delete_controller(cluster: SimulatedCluster, seconds: int | None = None) -> None:
    cluster.delete_pod(CONTROLLER, grace_seconds=seconds).settled()


@pytest.mark.parametrize(
    ("own_seconds", "events", "seconds"),
    [
        (120, [suspend], 120),
        (120, [lose_a_worker], WITHOUT_WORKERS_SECONDS),
        (120, [delete_controller], 120),
        (120, [delete_controller, lose_a_worker], WITHOUT_WORKERS_SECONDS),
        (120, [delete_controller, lambda cluster: cluster.end(POLICY_0, 137)], WITHOUT_WORKERS_SECONDS),
        (120, [lambda cluster: delete_controller(cluster, 5), lose_a_worker], 5),
        (5, [lose_a_worker], 5),
    ],
)
def test_a_controller_that_lost_a_worker_gets_only_a_moment(own_seconds: int, events: list[Any], seconds: int) -> None:
    settings = SETTINGS.model_copy(update={"termination_grace_seconds": own_seconds})
    cluster = SimulatedCluster(settings=settings).run()
    for event in events:
        event(cluster)
    cluster.settled()
    assert cluster.pods[CONTROLLER].deletion_grace_seconds == seconds
