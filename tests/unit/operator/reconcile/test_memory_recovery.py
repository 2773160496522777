"""Memory runs out, the plan is changed by the operator or the trainer, and the job resumes or explains why not."""

from __future__ import annotations

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_api.plan_change import PlanChange
from rljob_testing.simulated_cluster import CONTROLLER, PLAN, POLICY_1, SimulatedCluster, running_job
from tests.unit.operator.reconcile.memory_failures import (
    GIB,
    evidence,
    run_out,
    running,
    trainers_change,
)

SECOND_PLAN = PLAN.model_copy(update={"generation": 2, "micro_batch_tokens": 2048})
LEAK = {"class": "RetainedGraph", "confidence": 0.8, "message": "tensors in use grow by 1.00 GiB a step"}
PRESSURE = {"diagnosis": LEAK, "role": "policy", "rank": 1, "stepsLeft": 12}


# --- the operator's changes ---


def test_the_changed_plan_is_written_down_before_anything_acts_on_it() -> None:
    cluster = run_out(running())
    desired = cluster.round()
    assert (desired.apply, desired.create, desired.delete_pods) == ((), (), ())
    plan, (change,) = cluster.plan, cluster.stored.plan_changes
    assert (plan.generation, change.generation, change.attempt, change.step) == (2, 2, 1, 4)
    assert plan.model_copy(update={"generation": 1}) != PLAN
    assert (change.phase, change.role, change.rank, change.level) == ("update", "policy", 1, "ReplacePods")


def test_an_out_of_memory_job_restarts_at_once_under_a_new_plan() -> None:
    cluster = running(step=0)
    cluster.events.clear()
    message = ("6.10 GiB", "(adjustment 1 of 6)")
    run_out(cluster, step=0).settled(phase="Recovering", recovering="MemoryPlanChanged", recovering_contains=message)
    cluster.expect(reason="DeviceOutOfMemory", message="policy-1 ran out")
    cluster.stop().expect(number=2, plan_generation=2, adjustments=1, restarts=0)  # no delay, though without a step
    first, (change,), last = cluster.stored.attempts[0], cluster.stored.plan_changes, cluster.stored.last_out_of_memory
    assert first.remedy == change.remedy
    assert last is not None
    assert (last.step, last.diagnosis) == (1, first.diagnosis)
    cluster.next_attempt_runs().reports(1).settle()
    assert cluster.events == ["OutOfMemory", "PlanChanged", "AttemptStarted", "Recovered"]
    (change,) = cluster.stored.plan_changes
    assert change.seconds_to_recover == (cluster.now - change.time).total_seconds() > 0


@pytest.mark.parametrize(("failures", "most"), [(1, 0), (3, 2)])
def test_exhausted_adjustments_fail_the_job_with_an_account(failures: int, most: int) -> None:
    cluster = running(recovery={"maxAdjustments": most})
    for _ in range(failures):
        run_out(cluster).next_attempt_runs()
    account = tuple(f"generation {change.generation}" for change in cluster.stored.plan_changes)
    cluster.expect(failed="AdjustmentsExhausted", recovering="GivenUp", failed_contains=account)
    assert len(account) == most


def test_progress_gives_adjustments_back() -> None:
    cluster = running(recovery={"maxAdjustments": 1}, steps=1000)
    for step in (20, 40, 60):
        run_out(cluster, step=step).next_attempt_runs().expect(adjustments=1)
    run_out(cluster, step=62).settled(failed="AdjustmentsExhausted")


def test_a_pinned_setting_in_the_way_is_named_with_what_to_write() -> None:
    cluster = running_job(memory={"detachMetrics": "Disabled"})
    cluster.reports(3, plan=PLAN.model_copy(update={"detach_metrics": False}))
    run_out(cluster, diagnoses=[LEAK]).settled(failed="PinnedSettingConflict", restarts=0)
    cluster.expect(failed_contains="memory.detachMetrics is pinned to Disabled: write Enabled, or Auto")


def test_a_fixed_plan_makes_a_failure_an_explained_restart() -> None:
    cluster = run_out(running(memory={"mode": "Disabled"}))
    cluster.settled(restarts=1, adjustments=0, recovering="SamePlanRestart", plan=PLAN)
    assert cluster.attempt.diagnosis is not None
    assert cluster.stored.last_out_of_memory is not None


def test_a_trainer_that_dies_before_it_has_a_plan_is_restarted() -> None:
    cluster = running_job().end(CONTROLLER, ExitCode.DEVICE_OUT_OF_MEMORY, message="ran out while loading")
    cluster.settled(restarts=1, plan=None)


# --- evidence ---


def test_the_step_report_replaces_a_missing_termination_message() -> None:
    cluster = running()
    cluster.reports(3, last_evidence=evidence(cluster, rank=0)).end(CONTROLLER, ExitCode.DEVICE_OUT_OF_MEMORY).settle()
    (change,) = cluster.stored.plan_changes
    assert (change.rank, change.diagnosis.class_name) == (0, "Fragmentation")


def test_an_exit_code_of_memory_outweighs_unrelated_and_handled_messages() -> None:
    unknown = {"class": "Unknown", "confidence": 0.5, "message": "memory ran out"}
    message, full = "found 10 MiB, expected more", ExitCode.SHARED_MEMORY_EXHAUSTED
    unrelated = run_out(running(), code=full, message=message, diagnoses=[unknown]).settled().attempt.diagnosis
    assert unrelated is not None
    assert (unrelated.class_name, unrelated.message) == ("SharedMemory", message)
    cluster = running()
    handled = evidence(cluster, rank=0)
    cluster.reports(3, last_evidence=handled, plan=SECOND_PLAN, plan_changes=[trainers_change(cluster)]).settled()
    cluster.tick(5).end(POLICY_1, full, text="No space left on device").settle()
    assert cluster.attempt.diagnosis is not None
    assert cluster.attempt.diagnosis.class_name == "SharedMemory"


# --- the trainer's changes ---


def trainer_changes(cluster: SimulatedCluster, *changes: PlanChange, step: int = 3) -> SimulatedCluster:
    """Report these changes, and the plan that they lead to."""
    plan = PLAN.model_copy(update={"generation": changes[-1].generation, "micro_batch_tokens": 2048})
    return cluster.reports(step, plan=plan, plan_changes=list(changes))


def test_a_change_that_the_trainer_made_is_adopted_counted_and_reported() -> None:
    cluster = running()
    cluster.events.clear()
    change = trainers_change(cluster)
    trainer_changes(cluster, change, change).settled(plan=SECOND_PLAN, plan_changes=[change], adjustments=1)
    cluster.expect(phase="Recovering", running=True)
    last = cluster.stored.last_out_of_memory
    assert last is not None
    assert last.diagnosis.class_name == "ActivationSpike"
    remedy = change.remedy.model_copy(update={"observed_bytes": GIB})
    done = change.model_copy(update={"remedy": remedy, "seconds_to_recover": 4.0})
    trainer_changes(cluster.tick(5), done, step=4).settled(plan_changes=[done], phase="Running", adjustments=1)
    cluster.expect(recovering_contains="resumed at step 4 after 4 s; freed 1.00 GiB")
    assert cluster.events == ["OutOfMemory", "PlanChanged", "Recovered"]


def test_a_preventive_change_costs_no_adjustment() -> None:
    cluster = running()
    trainer_changes(cluster, trainers_change(cluster, preventive=True))
    cluster.settled(adjustments=0, phase="Running", last_out_of_memory=None)


def test_changes_during_an_outage_are_applied_in_order() -> None:
    cluster = running()
    trainer_changes(cluster, *(trainers_change(cluster, generation) for generation in (2, 3, 4)))
    run_out(cluster.tick(60)).settled(adjustments=4)
    assert [change.generation for change in cluster.stored.plan_changes] == [2, 3, 4, 5]


def test_a_change_made_on_a_warning_does_not_hide_the_recovery_before_it() -> None:
    cluster = running()
    trainer_changes(cluster, trainers_change(cluster)).tick(10).settled(recovering=True)
    recovered = trainers_change(cluster, seconds_to_recover=2.0)
    preventive = trainers_change(cluster, 3, preventive=True, step=5)
    trainer_changes(cluster, recovered, preventive, step=4).tick(10).settled(recovering=False)


def test_the_trainer_does_not_set_what_its_pods_are_given() -> None:
    cluster = running(limit="8Gi", recovery={"maxHostMemory": "12Gi"}).end(POLICY_1, 137, reason="OOMKilled")
    greedy = PLAN.model_copy(update={"generation": 9, "host_memory_bytes": 900 * GIB, "excluded_nodes": ["gpu-node"]})
    cluster.next_attempt_runs().reports(3, plan=greedy).tick(10)
    cluster.settled(plan=greedy.model_copy(update={"host_memory_bytes": 12 * GIB, "excluded_nodes": []}))


# --- warnings ---


def test_memory_that_is_about_to_run_out_is_reported_until_it_is_not() -> None:
    cluster = running()
    for step in (4, 5):
        message = f"policy rank 1 is projected to run out of memory in {16 - step} steps"
        cluster.reports(step, memory_pressure=PRESSURE | {"stepsLeft": 16 - step})
        cluster.settled(memory_pressure=(True, "MemoryRunningOut"), memory_pressure_contains=message).tick(20)
    assert cluster.events.count("MemoryPressure") == 1
    cluster.reports(6).settled(memory_pressure="EnoughMemory")
    cluster.reports(7, memory_pressure=PRESSURE).settled(memory_pressure=True)
    cluster.end(CONTROLLER, 1, message="it broke", step=7).settled(memory_pressure=False)  # it ends with its attempt


def test_the_last_and_the_best_evaluation_are_in_the_status() -> None:
    cluster = running()
    first, second = ({"step": step, "metric": "pass@1", "score": score} for step, score in ((2, 0.5), (4, 0.25)))
    cluster.reports(3, evaluation={"last": first, "best": first}).tick(60).settled()
    assert cluster.stored.display is not None
    assert cluster.stored.display.evaluation == "0.5 (2)"
    cluster.reports(5, evaluation={"last": second, "best": first}).tick(60).settled()
    assert cluster.stored.evaluation is not None
    assert (cluster.stored.evaluation.last.step, cluster.stored.evaluation.best.score) == (4, 0.5)
    assert cluster.stored.display.evaluation == "0.25 (4), best 0.5 (2)"


def test_a_step_that_trained_on_nothing_degrades_the_job_until_one_learns() -> None:
    cluster = running()
    for step, reason in ((4, "RewardsEqual"), (5, "ResponsesTruncated")):
        cluster.reports(step, training_warning={"reason": reason, "message": "no response can be learned from"})
        cluster.settled(degraded=(True, reason), degraded_contains="no response can be learned from").tick(20)
    assert cluster.events.count("Degraded") == 1
    cluster.reports(6).settled(degraded="NoWarning")
    cluster.reports(60, training_warning={"reason": "RewardsEqual", "message": "equal rewards"})
    cluster.complete().expect(complete=True, degraded="RewardsEqual")
