"""Suspending, deleting and resuming a job. The controller goes first, with time to commit its step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_operator.reconcile.desired import Desired
from rljob_operator.reconcile.pod_deletion import WITHOUT_WORKERS_SECONDS
from rljob_testing.simulated_cluster import (
    CONTROLLER,
    POLICY_0,
    POLICY_1,
    SETTINGS,
    SimulatedCluster,
    created_job,
    new_job,
    running_job,
)
from tests.unit.operator.reconcile.memory_failures import run_out, running

NAMESPACED = SETTINGS.model_copy(update={"namespaces": ("team",)})
WORKERS = {POLICY_0, POLICY_1}


def test_a_job_that_is_created_suspended_has_no_pods() -> None:
    cluster = new_job(suspend=True)
    assert cluster.settle() == Desired()
    cluster.expect(phase="Suspended", suspended="SuspendRequested", pods=set(), attempts=[], start_time=None)


def test_suspending_commits_the_step_and_resuming_is_no_restart() -> None:
    cluster = running_job(activeDeadlineSeconds=3600).change_spec(suspend=True)
    cluster.settled(deleting={CONTROLLER}, suspended=False)
    cluster.reports(12).finish_deletions().settled(deleting=WORKERS).finish_deletions()
    assert cluster.settle() == Desired()
    cluster.expect(phase="Suspended", reason="SuspendRequested", to_step=12)
    assert cluster.events[-1] == "Suspended"
    cluster.tick(100_000).settled(phase="Suspended")  # which does not count towards the deadline
    cluster.change_spec(suspend=False).run()
    cluster.expect(phase="Running", number=2, from_step=13, restarts=0, suspended="Resumed")
    assert cluster.events[-2:] == ["Resumed", "AttemptStarted"]
    cluster.change_spec(suspend=True).settled().complete().expect(phase="Complete")  # its last step was in progress


@pytest.mark.parametrize("facts", [{}, {"problem": "spec.task: expected an object"}])
def test_deletion_ends_the_controller_then_workers_then_finalizer(facts: dict[str, Any]) -> None:
    cluster = running_job().observes(**facts).delete_job()
    for deleting in ({CONTROLLER}, WORKERS):
        cluster.settled(deleting=deleting)
        assert not cluster.gone
        cluster.finish_deletions()
    assert cluster.settled().gone


def test_in_a_namespace_that_is_being_deleted_nothing_is_made() -> None:
    created_job(facts={"namespace_terminating": True}).expect(pods=set(), scheduled="NamespaceTerminating")


def test_deletion_of_an_unadmitted_job_deletes_its_workload() -> None:
    cluster = created_job(queueName="gpus", facts={"kueue_installed": True}).gate()
    assert cluster.round().delete_workloads == ()
    cluster.deleting = True
    for name in cluster.pods:
        cluster.change_pod(name, deleting=True)
    assert cluster.round().delete_workloads == ("demo-rljob-1",)


@pytest.mark.parametrize("settles", [True, False])
def test_a_job_of_a_listed_namespace_has_no_finalizer_and_goes_at_once(settles: bool) -> None:
    cluster = running_job()
    assert cluster.finalizer
    cluster.settings = NAMESPACED
    if settles:
        assert not cluster.settled(phase="Running").finalizer
    cluster.delete_job().round()
    assert cluster.gone


def delete_controller(cluster: SimulatedCluster, seconds: int | None = None) -> None:
    cluster.delete_pod(CONTROLLER, grace_seconds=seconds).settled()


def lose_a_worker(cluster: SimulatedCluster) -> None:
    cluster.vanish(POLICY_0)


@pytest.mark.parametrize(
    ("own_seconds", "events", "seconds"),
    [
        (120, [lambda cluster: cluster.change_spec(suspend=True)], 120),
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
    cluster = running_job(settings=settings)
    for event in events:
        event(cluster)
    assert cluster.settled().pods[CONTROLLER].deletion_grace_seconds == seconds


# --- a failed job resumes after a change of its spec, with fresh budgets and its whole record ---


def fail(cluster: SimulatedCluster, step: int | None = None) -> SimulatedCluster:
    return cluster.end(CONTROLLER, ExitCode.ERROR, message="rank 1 died", step=step).settled()


def exhausted() -> SimulatedCluster:
    return fail(fail(running_job(recovery={"maxRestarts": 1})).next_attempt_runs())


def bad_input(step: int | None = None) -> SimulatedCluster:
    cluster = running_job().end(CONTROLLER, ExitCode.BAD_INPUT, message="the data set is empty", step=step)
    return cluster.settled(phase="Failed")


def pod_cannot_start() -> SimulatedCluster:
    return created_job().place().change_pod(POLICY_0, waiting="ErrImagePull: not found").tick(1801)


def no_adjustments() -> SimulatedCluster:
    cluster = running(recovery={"maxAdjustments": 0})
    return run_out(cluster)


def preempted_without_end() -> SimulatedCluster:
    cluster = running_job()
    for attempt in range(20):
        if attempt:
            cluster.next_attempt_runs()
        cluster.change_pod(CONTROLLER, disruption="PreemptionByScheduler", phase="Failed").settled()
    return cluster


_TEMPLATE = {"spec": {"containers": [{"name": "rljob", "image": "registry.example/trainer:2"}]}}


@pytest.mark.parametrize(
    ("failed", "reason", "edit"),
    [
        (exhausted, "RestartsExhausted", {"recovery": {"maxRestarts": 2}}),
        (bad_input, "BadInput", {"retry": 1}),
        (pod_cannot_start, "PodCannotStart", {"policy": {"replicas": 2, "template": _TEMPLATE}}),
        (
            lambda: running_job(activeDeadlineSeconds=3600).tick(3601),
            "DeadlineExceeded",
            {"activeDeadlineSeconds": 7200},
        ),
        (no_adjustments, "AdjustmentsExhausted", {"recovery": {"maxAdjustments": 6}}),
        (preempted_without_end, "NoProgress", {"retry": 1}),
    ],
)
def test_a_failed_job_resumes_after_an_edit_that_answers_it(
    failed: Callable[[], SimulatedCluster], reason: str, edit: dict[str, Any]
) -> None:
    cluster = failed()
    cluster.settled(phase="Failed", failed=reason, failed_contains="The job resumes after a change of its spec")
    last = cluster.attempt
    cluster.change_spec(**edit).settled(phase="Pending", failed="Resumed")
    assert "Resumed" in cluster.events
    cluster.stop().expect(number=last.number + 1)  # at once, without a delay
    cluster.run().expect(phase="Running", restarts=0, adjustments=0, completion_time=None)
    assert last.number in [attempt.number for attempt in cluster.stored.attempts], "the record is kept"
    cluster.complete().expect(phase="Complete")


@pytest.mark.parametrize(
    ("step", "message"), [(3, "the job resumes at step 4"), (60, "the job resumes after step 60, its last one")]
)
def test_no_step_beyond_the_last_one_is_announced(step: int, message: str) -> None:
    bad_input(step).change_spec(retry=1).settled(failed_contains=message)


@pytest.mark.parametrize("edit", [{"ttlSecondsAfterFinished": 86400}, {"suspend": True}, {"suspend": False}])
def test_an_edit_without_effect_on_an_attempt_resumes_nothing(edit: dict[str, Any]) -> None:
    bad_input().change_spec(**edit).settled(phase="Failed")


def test_an_edit_before_the_failure_does_not_resume_the_job() -> None:
    cluster = running_job(activeDeadlineSeconds=36_000).tick(3601).change_spec(activeDeadlineSeconds=3600)
    cluster.settled(phase="Failed").tick(60).settled(phase="Failed")


def test_a_new_version_of_the_operator_resumes_nothing_by_itself() -> None:
    """An earlier one had other defaults, or did not record the failure."""
    cluster = bad_input()
    assert cluster.stored.failure is not None
    other = cluster.stored.failure.model_copy(update={"spec_digest": "of another version"})
    for failure in (other, None):
        cluster.set_status(cluster.stored.model_copy(update={"failure": failure})).settled(phase="Failed")
    cluster.change_spec(retry=1).settled(phase="Pending")


def test_a_resumed_job_has_its_whole_budget_again() -> None:
    cluster = exhausted().expect(phase="Failed").change_spec(retry=1).next_attempt_runs()
    fail(cluster).expect(phase="Recovering", recovering_contains="rank 1 died (restart 1 of 1)")
    fail(cluster.next_attempt_runs()).expect(failed="RestartsExhausted")
    cluster.expect(failed_contains="earlier attempts: 3: Error)")  # since the edit


def test_a_resumed_job_that_is_suspended_waits() -> None:
    cluster = bad_input().change_spec(retry=1, suspend=True).stop().expect(phase="Suspended", number=1)
    cluster.change_spec(suspend=False).run().expect(phase="Running", number=2)
