"""A failed job resumes after a change of its spec, with fresh budgets and its whole record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rljob_api.conditions import ConditionType
from rljob_api.exit_codes import ExitCode
from rljob_testing.simulated_cluster import CONTROLLER, POLICY_0, SimulatedCluster, job_spec
from tests.unit.operator.reconcile.memory_failures import out_of_device_memory, running


def exhausted() -> SimulatedCluster:
    cluster = SimulatedCluster(spec=job_spec(recovery={"maxRestarts": 1})).run()
    for _ in range(2):
        cluster.end(CONTROLLER, ExitCode.ERROR, sentence="rank 1 died")
        cluster.settle()
        cluster.next_attempt_runs()
    return cluster


def bad_input() -> SimulatedCluster:
    cluster = SimulatedCluster().run()
    cluster.end(CONTROLLER, ExitCode.BAD_INPUT, sentence="the data set is empty")
    return cluster


def pod_cannot_start() -> SimulatedCluster:
    cluster = SimulatedCluster()
    cluster.settle()
    cluster.place()
    cluster.change_pod(POLICY_0, waiting="ErrImagePull: not found")
    cluster.tick(1801)
    return cluster


def too_late() -> SimulatedCluster:
    cluster = SimulatedCluster(spec=job_spec(activeDeadlineSeconds=3600)).run()
    cluster.tick(3601)
    return cluster


def no_adjustments() -> SimulatedCluster:
    cluster = running(recovery={"maxAdjustments": 0})
    out_of_device_memory(cluster)
    return cluster


def preempted_without_end() -> SimulatedCluster:
    cluster = SimulatedCluster().run()
    for _ in range(20):
        cluster.change_pod(CONTROLLER, disruption="PreemptionByScheduler", phase="Failed")
        cluster.settle()
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
    cluster.settle()
    condition = cluster.condition(ConditionType.FAILED)
    assert (cluster.phase, condition.reason) == ("Failed", reason)
    assert "The job resumes after a change of its spec" in condition.message
    last = cluster.attempt
    cluster.change_spec(**edit)
    cluster.settle()
    assert cluster.phase == "Pending"
    assert cluster.condition(ConditionType.FAILED).reason == "Resumed"
    assert "Resumed" in cluster.events
    for _ in range(3):
        cluster.finish_deletions()
        cluster.settle()
    assert cluster.attempt.number == last.number + 1, "at once, without a delay"
    cluster.run()
    assert cluster.status is not None
    assert cluster.phase == "Running"
    assert (cluster.status.restarts, cluster.status.adjustments, cluster.status.completion_time) == (0, 0, None)
    assert last.number in [attempt.number for attempt in cluster.status.attempts], "the record is kept"
    cluster.end(CONTROLLER, 0, sentence="done", step=60)
    cluster.settle()
    assert cluster.phase == "Complete"


@pytest.mark.parametrize(
    ("step", "message"), [(3, "the job resumes at step 4"), (60, "the job resumes after step 60, its last one")]
)
def test_no_step_beyond_the_last_one_is_announced(step: int, message: str) -> None:
    cluster = SimulatedCluster().run()
    cluster.end(CONTROLLER, ExitCode.BAD_INPUT, sentence="the model cannot be written", step=step)
    cluster.settle()
    cluster.change_spec(retry=1)
    cluster.settle()
    assert cluster.condition(ConditionType.FAILED).message.endswith(message)


@pytest.mark.parametrize("edit", [{"ttlSecondsAfterFinished": 86400}, {"suspend": True}, {"suspend": False}])
def test_an_edit_without_effect_on_an_attempt_resumes_nothing(edit: dict[str, Any]) -> None:
    cluster = bad_input()
    cluster.settle()
    cluster.change_spec(**edit)
    cluster.settle()
    assert cluster.phase == "Failed"


def test_an_edit_before_the_failure_does_not_resume_the_job() -> None:
    cluster = SimulatedCluster(spec=job_spec(activeDeadlineSeconds=36_000)).run()
    cluster.tick(3601)
    cluster.change_spec(activeDeadlineSeconds=3600)
    cluster.settle()
    assert cluster.phase == "Failed"
    cluster.tick(60)
    cluster.settle()
    assert cluster.phase == "Failed"


def test_a_failed_job_of_an_earlier_version_resumes_after_the_next_edit() -> None:
    cluster = bad_input()
    cluster.settle()
    assert cluster.status is not None
    cluster.set_status(cluster.status.model_copy(update={"failure": None}))
    cluster.settle()
    assert cluster.phase == "Failed"
    cluster.change_spec(retry=1)
    cluster.settle()
    assert cluster.phase == "Pending"


def test_other_defaults_of_a_new_version_resume_nothing() -> None:
    cluster = bad_input()
    cluster.settle()
    assert cluster.status is not None
    assert cluster.status.failure is not None
    other = cluster.status.failure.model_copy(update={"spec_digest": "of another version"})
    cluster.set_status(cluster.status.model_copy(update={"failure": other}))
    cluster.settle()
    assert cluster.phase == "Failed"


def test_a_resumed_job_has_its_whole_budget_again() -> None:
    cluster = exhausted()
    cluster.settle()
    assert cluster.phase == "Failed"
    cluster.change_spec(retry=1)
    cluster.next_attempt_runs()
    cluster.end(CONTROLLER, ExitCode.ERROR, sentence="rank 1 died")
    cluster.settle()
    assert cluster.phase == "Recovering"
    assert cluster.condition(ConditionType.RECOVERING).message == "rank 1 died (restart 1 of 1)"
    cluster.next_attempt_runs()
    cluster.end(CONTROLLER, ExitCode.ERROR, sentence="rank 1 died")
    cluster.settle()
    failed = cluster.condition(ConditionType.FAILED)
    assert failed.reason == "RestartsExhausted"
    assert "earlier attempts: 3: Error)" in failed.message, "not those before the edit"


def test_a_resumed_job_that_is_suspended_waits() -> None:
    cluster = bad_input()
    cluster.settle()
    cluster.change_spec(retry=1, suspend=True)
    for _ in range(3):
        cluster.settle()
        cluster.finish_deletions()
    assert (cluster.phase, cluster.attempt.number) == ("Suspended", 1)
    cluster.change_spec(suspend=False)
    cluster.run()
    assert (cluster.phase, cluster.attempt.number) == ("Running", 2)
