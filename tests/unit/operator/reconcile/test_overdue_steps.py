"""An overdue step is reported once; the operator does not intervene."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.conditions import ConditionType
from rljob_api.exit_codes import ExitCode
from rljob_testing.simulated_cluster import CONTROLLER, SimulatedCluster

TOLD_AFTER = 10.0
QUICK, SLOW = {"update": 8.0}, {"rollout": 100.0, "update": 50.0}


def running(step: int, **report: Any) -> SimulatedCluster:
    """`step` steps were committed `TOLD_AFTER` seconds ago, and that is in the status."""
    cluster = SimulatedCluster().run()
    cluster.reports(step, update_time=cluster.now, phase="update", **report)
    cluster.tick(TOLD_AFTER)
    cluster.settle()
    return cluster


def reason(cluster: SimulatedCluster) -> str:
    return cluster.condition(ConditionType.RUNNING).reason


@pytest.mark.parametrize(("step", "seconds", "allowed"), [(5, QUICK, 600), (5, SLOW, 3000), (0, None, 1800)])
def test_it_is_looked_at_when_it_is_overdue(step: int, seconds: Any, allowed: float) -> None:
    cluster = running(step, seconds=seconds)
    assert cluster.last.requeue_after_seconds == allowed - TOLD_AFTER
    cluster.tick(allowed - TOLD_AFTER - 1)
    cluster.settle()
    assert reason(cluster) == "StepsCommitted"
    cluster.tick(1)
    cluster.settle()
    assert reason(cluster) == "StepOverdue"
    assert cluster.last.requeue_after_seconds is None


def test_the_sentence_says_what_since_when_and_what_is_usual() -> None:
    cluster = running(5, seconds=QUICK)
    cluster.tick(700)
    cluster.settle()
    condition = cluster.condition(ConditionType.RUNNING)
    assert condition.status == "True"
    assert condition.message.startswith(
        "step 6 (update) is overdue: the trainer has reported nothing since 2026-01-01 00:00:00 UTC; "
        "the previous step took 8 s; "
    )


def test_it_is_told_once_and_the_attempt_goes_on() -> None:
    cluster = running(5, seconds=QUICK)
    for _ in range(3):
        cluster.tick(700)
        cluster.settle()
    assert cluster.events.count("StepOverdue") == 1
    assert len(cluster.pods) == 3
    writes = cluster.status_writes
    cluster.reports(6, update_time=cluster.now, seconds=QUICK)
    cluster.settle()
    assert reason(cluster) == "StepsCommitted"
    assert cluster.status_writes == writes + 1


def test_after_the_last_step_it_is_the_model_that_is_waited_for() -> None:
    cluster = running(60, seconds=QUICK)
    cluster.tick(700)
    cluster.settle()
    assert cluster.condition(ConditionType.RUNNING).message.startswith("the final model is overdue")


def test_a_report_without_a_time_says_nothing_of_the_step_in_progress() -> None:
    cluster = SimulatedCluster().run()
    cluster.reports(5)
    cluster.tick(10_000)
    cluster.settle()
    assert reason(cluster) == "StepsCommitted"


def test_a_step_of_the_attempt_before_is_not_in_progress() -> None:
    cluster = running(5, seconds=QUICK)
    cluster.end(CONTROLLER, ExitCode.ERROR, sentence="an error")
    cluster.next_attempt_runs()
    assert (cluster.attempt.number, cluster.report.attempt if cluster.report else None) == (2, 1)
    cluster.tick(700)
    cluster.settle()
    assert reason(cluster) == "StepsCommitted"
