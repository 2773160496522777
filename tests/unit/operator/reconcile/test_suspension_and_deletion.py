"""Suspending, resuming and deleting a job, at any moment of its life."""

from __future__ import annotations

from rljob_api.conditions import ConditionType
from rljob_operator.reconcile.desired import Desired
from rljob_testing.simulated_cluster import CONTROLLER, POLICY_0, POLICY_1, SETTINGS, SimulatedCluster, job_spec


def test_a_job_that_is_created_suspended_has_no_pods() -> None:
    cluster = SimulatedCluster(spec=job_spec(suspend=True))
    assert cluster.settle() == Desired()
    assert cluster.phase == "Suspended"
    assert cluster.condition(ConditionType.SUSPENDED).reason == "SuspendRequested"
    assert cluster.pods == {}
    assert cluster.status is not None
    assert (cluster.status.attempts, cluster.status.start_time) == ([], None)


def test_suspending_commits_the_step_before_the_workers_go() -> None:
    cluster = SimulatedCluster().run()
    cluster.change_spec(suspend=True)
    cluster.settle()
    assert [pod.name for pod in cluster.pods.values() if pod.deleting] == [CONTROLLER]
    assert not cluster.holds(ConditionType.SUSPENDED)
    cluster.reports(12)
    cluster.finish_deletions()
    cluster.settle()
    assert {pod.name for pod in cluster.pods.values() if pod.deleting} == {POLICY_0, POLICY_1}
    cluster.finish_deletions()
    assert cluster.settle() == Desired()
    assert cluster.phase == "Suspended"
    assert (cluster.attempt.reason, cluster.attempt.to_step) == ("SuspendRequested", 12)
    assert cluster.events[-1] == "Suspended"


def test_resuming_is_a_new_attempt_and_no_restart() -> None:
    cluster = SimulatedCluster().run()
    cluster.change_spec(suspend=True)
    for _ in range(3):
        cluster.settle()
        cluster.finish_deletions()
    cluster.reports(12)
    cluster.settle()
    cluster.change_spec(suspend=False)
    cluster.run()
    assert (cluster.phase, cluster.attempt.number, cluster.attempt.from_step) == ("Running", 2, 13)
    assert cluster.status is not None
    assert cluster.status.restarts == 0
    assert cluster.condition(ConditionType.SUSPENDED).reason == "Resumed"
    assert cluster.events[-2:] == ["Resumed", "AttemptStarted"]


def test_suspended_time_does_not_count_towards_the_deadline() -> None:
    cluster = SimulatedCluster(spec=job_spec(activeDeadlineSeconds=3600)).run()
    cluster.change_spec(suspend=True)
    for _ in range(3):
        cluster.settle()
        cluster.finish_deletions()
    cluster.tick(100_000)
    cluster.settle()
    assert cluster.phase == "Suspended"
    cluster.change_spec(suspend=False)
    assert cluster.run().phase == "Running"


def test_a_job_whose_last_step_is_committed_while_it_stops_is_complete() -> None:
    cluster = SimulatedCluster().run()
    cluster.change_spec(suspend=True)
    cluster.settle()
    cluster.end(CONTROLLER, 0, sentence="all steps are committed", step=60)
    cluster.settle()
    assert cluster.phase == "Complete"


def test_deletion_ends_the_controller_then_workers_then_finalizer() -> None:
    cluster = SimulatedCluster().run()
    cluster.delete_job()
    cluster.settle()
    assert [pod.name for pod in cluster.pods.values() if pod.deleting] == [CONTROLLER]
    cluster.finish_deletions()
    cluster.settle()
    assert not cluster.gone
    cluster.finish_deletions()
    cluster.settle()
    assert cluster.gone


def test_a_job_that_is_deleted_before_it_started_goes_at_once() -> None:
    cluster = SimulatedCluster()
    cluster.round()
    cluster.delete_job()
    cluster.settle()
    assert cluster.gone


def test_a_deleted_job_that_cannot_be_read_still_goes() -> None:
    cluster = SimulatedCluster().run()
    cluster.facts = {"problem": "spec.task: expected an object"}
    cluster.delete_job()
    for _ in range(3):
        cluster.settle()
        cluster.finish_deletions()
    assert cluster.gone


def test_in_a_namespace_that_is_being_deleted_nothing_is_made() -> None:
    cluster = SimulatedCluster(facts={"namespace_terminating": True})
    cluster.settle()
    assert cluster.pods == {}
    assert cluster.condition(ConditionType.SCHEDULED).reason == "NamespaceTerminating"


def test_deletion_of_an_unadmitted_job_deletes_its_workload() -> None:
    cluster = SimulatedCluster(spec=job_spec(queueName="gpus"), facts={"kueue_installed": True})
    cluster.settle()
    for name in cluster.pods:
        cluster.change_pod(name, gated=True)
    assert cluster.round().delete_workloads == ()
    cluster.deleting = True
    for name in cluster.pods:
        cluster.change_pod(name, deleting=True)
    assert cluster.round().delete_workloads == ("demo-rljob-1",)


NAMESPACED = SETTINGS.model_copy(update={"namespaces": ("team",)})


def test_a_job_of_a_listed_namespace_has_no_finalizer() -> None:
    cluster = SimulatedCluster(settings=NAMESPACED).run()
    assert not cluster.finalizer
    cluster.delete_job()
    assert cluster.gone


def test_a_finalizer_from_before_goes_at_once_in_a_listed_namespace() -> None:
    cluster = SimulatedCluster().run()
    assert cluster.finalizer
    cluster.settings = NAMESPACED
    cluster.settle()
    assert not cluster.finalizer
    assert cluster.phase == "Running"


def test_a_deleted_job_of_a_listed_namespace_does_not_wait_for_its_pods() -> None:
    cluster = SimulatedCluster().run()
    cluster.settings = NAMESPACED
    cluster.delete_job()
    cluster.round()
    assert cluster.gone
