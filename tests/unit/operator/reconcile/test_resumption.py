"""A failed job resumes after a change of its spec, with fresh budgets and its whole record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_testing.simulated_cluster import CONTROLLER, POLICY_0, SimulatedCluster, created_job, running_job
from tests.unit.operator.reconcile.memory_failures import out_of_device_memory, running


def exhausted() -> SimulatedCluster:
    cluster = running_job(recovery={"maxRestarts": 1})
    for _ in range(2):
        cluster.end(CONTROLLER, ExitCode.ERROR, sentence="rank 1 died").next_attempt_runs()
    return cluster


def bad_input(step: int | None = None) -> SimulatedCluster:
    cluster = running_job().end(CONTROLLER, ExitCode.BAD_INPUT, sentence="the data set is empty", step=step)
    cluster.settled(phase="Failed")
    return cluster


def pod_cannot_start() -> SimulatedCluster:
    cluster = created_job().place().change_pod(POLICY_0, waiting="ErrImagePull: not found").tick(1801)
    return cluster


def too_late() -> SimulatedCluster:
    cluster = running_job(activeDeadlineSeconds=3600).tick(3601)
    return cluster


def no_adjustments() -> SimulatedCluster:
    cluster = running(recovery={"maxAdjustments": 0})
    out_of_device_memory(cluster)
    return cluster


def preempted_without_end() -> SimulatedCluster:
    cluster = running_job()
    for _ in range(20):
        cluster.change_pod(CONTROLLER, disruption="PreemptionByScheduler", phase="Failed").settled()
        if cluster.phase != "Failed":
            cluster.next_attempt_runs()
    return cluster


_TEMPLATE = {"spec": {"containers": [{"name": "rljob", "image": "registry.example/trainer:2"}]}}


@pytest.mark.parametrize(
    ("failed", "reason", "edit"),
    [
        (exhausted, "RestartsExhausted", {"recovery": {"maxRestarts": 2}}),
        (bad_input, "BadInput", {"retry": 1}),
        (pod_cannot_start, "PodCannotStart", {"policy": {"replicas": 2, "template": _TEMPLATE}}),
        (too_late, "DeadlineExceeded", {"activeDeadlineSeconds": 7200}),
        (no_adjustments, "AdjustmentsExhausted", {"recovery": {"maxAdjustments": 6}}),
        (preempted_without_end, "NoProgress", {"retry": 1}),
    ],
)
def test_a_failed_job_resumes_after_an_edit_that_answers_it(
    failed: Callable[[], SimulatedCluster], reason: str, edit: dict[str, Any]
) -> None:
    cluster = failed()
    cluster.settled(phase="Failed", failed=reason, failed_says="The job resumes after a change of its spec")
    last = cluster.attempt
    cluster.change_spec(**edit).settled(phase="Pending", failed="Resumed")
    assert "Resumed" in cluster.events
    cluster.stop()
    cluster.expect(number=last.number + 1)  # at once, without a delay
    cluster.run().expect(phase="Running", restarts=0, adjustments=0, completion_time=None)
    assert last.number in [attempt.number for attempt in cluster.stored.attempts], "the record is kept"
    cluster.end(CONTROLLER, 0, sentence="done", step=60).settled(phase="Complete")


@pytest.mark.parametrize(
    ("step", "message"), [(3, "the job resumes at step 4"), (60, "the job resumes after step 60, its last one")]
)
def test_no_step_beyond_the_last_one_is_announced(step: int, message: str) -> None:
    cluster = bad_input(step)
    cluster.change_spec(retry=1).settled(failed_says=message)


@pytest.mark.parametrize("edit", [{"ttlSecondsAfterFinished": 86400}, {"suspend": True}, {"suspend": False}])
def test_an_edit_without_effect_on_an_attempt_resumes_nothing(edit: dict[str, Any]) -> None:
    cluster = bad_input()
    cluster.change_spec(**edit).settled(phase="Failed")


def test_an_edit_before_the_failure_does_not_resume_the_job() -> None:
    cluster = running_job(activeDeadlineSeconds=36_000).tick(3601).change_spec(activeDeadlineSeconds=3600)
    cluster.settled(phase="Failed")
    cluster.tick(60).settled(phase="Failed")


def test_a_new_version_of_the_operator_resumes_nothing_by_itself() -> None:
    """An earlier one had other defaults, or did not record the failure."""
    cluster = bad_input()
    assert cluster.stored.failure is not None
    other = cluster.stored.failure.model_copy(update={"spec_digest": "of another version"})
    for failure in (other, None):
        cluster.set_status(cluster.stored.model_copy(update={"failure": failure})).settled(phase="Failed")
    cluster.change_spec(retry=1).settled(phase="Pending")


def test_a_resumed_job_has_its_whole_budget_again() -> None:
    cluster = exhausted()
    cluster.settled(phase="Failed")
    cluster.change_spec(retry=1).next_attempt_runs()
    cluster.end(CONTROLLER, ExitCode.ERROR, sentence="rank 1 died")
    cluster.settled(phase="Recovering", recovering_says="rank 1 died (restart 1 of 1)")
    cluster.next_attempt_runs()
    cluster.end(CONTROLLER, ExitCode.ERROR, sentence="rank 1 died")
    cluster.settled(failed="RestartsExhausted", failed_says="earlier attempts: 3: Error)")  # since the edit


def test_a_resumed_job_that_is_suspended_waits() -> None:
    cluster = bad_input()
    cluster.change_spec(retry=1, suspend=True).stop().expect(phase="Suspended", number=1)
    cluster.change_spec(suspend=False).run().expect(phase="Running", number=2)
