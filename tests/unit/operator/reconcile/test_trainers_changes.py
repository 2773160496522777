"""The operator adopts, counts and reports the trainer's own changes of the plan, and reports its forecasts."""

from __future__ import annotations

from rljob_api.conditions import ConditionType
from rljob_testing.simulated_cluster import (
    CONTROLLER,
    PLAN,
    POLICY_1,
)
from tests.unit.operator.reconcile.memory_failures import (
    GIB,
    out_of_device_memory,
    running,
    status_of,
    trainers_change,
)


def test_a_change_that_the_trainer_made_is_taken_over_counted_and_told() -> None:
    cluster = running()
    cluster.events.clear()
    change = trainers_change(cluster)
    plan = PLAN.model_copy(update={"generation": 2, "micro_batch_tokens": 2048})
    cluster.reports(3, plan=plan, plan_changes=[change])
    cluster.settle()
    assert (status_of(cluster).plan, status_of(cluster).plan_changes) == (plan, [change])
    assert (status_of(cluster).adjustments, cluster.phase) == (1, "Recovering")
    assert cluster.holds(ConditionType.RUNNING)
    last = status_of(cluster).last_out_of_memory
    assert last is not None
    assert last.diagnosis.class_name == "ActivationSpike"

    cluster.tick(5)
    remedy = change.remedy.model_copy(update={"observed_bytes": GIB})
    done = change.model_copy(update={"remedy": remedy, "seconds_to_recover": 4.0})
    cluster.reports(4, plan=plan, plan_changes=[done])
    cluster.settle()
    assert status_of(cluster).plan_changes == [done]
    assert cluster.condition(ConditionType.RECOVERING).message == "resumed at step 4 after 4 s; freed 1.00 GiB"
    assert (cluster.phase, cluster.events) == ("Running", ["OutOfMemory", "PlanChanged", "Recovered"])
    assert status_of(cluster).adjustments == 1


def test_a_preventive_change_costs_no_adjustment() -> None:
    cluster = running()
    plan = PLAN.model_copy(update={"generation": 2, "micro_batch_tokens": 2048})
    cluster.reports(3, plan=plan, plan_changes=[trainers_change(cluster, preventive=True)])
    cluster.settle()
    assert (status_of(cluster).adjustments, cluster.phase) == (0, "Running")
    assert status_of(cluster).last_out_of_memory is None


def test_changes_during_an_outage_are_applied_in_order() -> None:
    cluster = running()
    changes = [trainers_change(cluster, generation) for generation in (2, 3, 4)]
    cluster.reports(3, plan=PLAN.model_copy(update={"generation": 4}), plan_changes=changes)
    cluster.tick(60)
    out_of_device_memory(cluster)
    cluster.settle()
    assert [change.generation for change in status_of(cluster).plan_changes] == [2, 3, 4, 5]
    assert status_of(cluster).adjustments == 4


def test_two_changes_of_one_generation_in_a_report_count_as_one() -> None:
    cluster = running()
    twice = [trainers_change(cluster), trainers_change(cluster)]
    cluster.reports(3, plan=PLAN.model_copy(update={"generation": 2}), plan_changes=twice)
    cluster.tick(10)
    cluster.settle()
    assert [change.generation for change in status_of(cluster).plan_changes] == [2]
    assert status_of(cluster).adjustments == 1


def test_a_change_made_on_a_warning_does_not_hide_the_recovery_before_it() -> None:
    cluster = running()
    cluster.reports(3, plan=PLAN.model_copy(update={"generation": 2}), plan_changes=[trainers_change(cluster)])
    cluster.tick(10)
    cluster.settle()
    assert cluster.condition(ConditionType.RECOVERING).status == "True"
    changes = [
        trainers_change(cluster, seconds_to_recover=2.0),
        trainers_change(cluster, 3, preventive=True, step=5),
    ]
    cluster.reports(4, plan=PLAN.model_copy(update={"generation": 3}), plan_changes=changes)
    cluster.tick(10)
    cluster.settle()
    assert cluster.condition(ConditionType.RECOVERING).status == "False"


def test_the_trainer_does_not_say_what_its_pods_are_given() -> None:
    cluster = running(limit="8Gi", recovery={"maxHostMemory": "12Gi"})
    cluster.end(POLICY_1, 137, reason="OOMKilled")
    cluster.next_attempt_runs()
    greedy = PLAN.model_copy(update={"generation": 9, "host_memory_bytes": 900 * GIB, "excluded_nodes": ["gpu-node"]})
    cluster.reports(3, plan=greedy)
    cluster.tick(10)
    cluster.settle()
    plan = status_of(cluster).plan
    assert plan is not None
    assert (plan.generation, plan.host_memory_bytes, plan.excluded_nodes) == (9, 12 * GIB, [])


def test_a_report_that_cannot_be_believed_changes_no_plan() -> None:
    cluster = running()
    plan = PLAN.model_copy(update={"generation": 2})
    cluster.reports(3, attempt=7, plan=plan, plan_changes=[trainers_change(cluster)])
    cluster.tick(10)
    cluster.settle()
    assert (status_of(cluster).plan, status_of(cluster).adjustments) == (PLAN, 0)


# --- what is about to happen ---


def test_memory_that_is_about_to_run_out_is_told_until_it_is_not() -> None:
    cluster = running()
    leak = {"class": "RetainedGraph", "confidence": 0.8, "message": "tensors in use grow by 1.00 GiB a step"}
    pressure = {"diagnosis": leak, "role": "policy", "rank": 1, "stepsLeft": 12}
    cluster.reports(4, memory_pressure=pressure)
    cluster.settle()
    condition = cluster.condition(ConditionType.MEMORY_PRESSURE)
    assert (condition.status, condition.reason) == ("True", "MemoryRunningOut")
    assert "policy rank 1 is projected to run out of memory in 12 steps" in condition.message
    cluster.tick(20)
    cluster.reports(5, memory_pressure=pressure | {"stepsLeft": 11})
    cluster.settle()
    assert cluster.events.count("MemoryPressure") == 1
    cluster.reports(6)
    cluster.settle()
    assert cluster.condition(ConditionType.MEMORY_PRESSURE).reason == "EnoughMemory"


def test_a_step_that_trained_on_nothing_degrades_the_job_until_one_learns() -> None:
    cluster = running()
    equal = {"reason": "RewardsEqual", "message": "step 4: the responses to each prompt have equal rewards"}
    cluster.reports(4, training_warning=equal)
    cluster.settle()
    condition = cluster.condition(ConditionType.DEGRADED)
    assert (condition.status, condition.reason, condition.message) == ("True", "RewardsEqual", equal["message"])
    cluster.tick(20)
    cluster.reports(5, training_warning=equal | {"reason": "ResponsesTruncated"})
    cluster.settle()
    assert cluster.condition(ConditionType.DEGRADED).reason == "ResponsesTruncated"
    assert cluster.events.count("Degraded") == 1
    cluster.reports(6)
    cluster.settle()
    assert cluster.condition(ConditionType.DEGRADED).reason == "NoWarning"


def test_a_job_that_completes_with_a_warning_stays_degraded() -> None:
    cluster = running()
    cluster.reports(60, training_warning={"reason": "RewardsEqual", "message": "equal rewards"})
    cluster.end(CONTROLLER, 0, sentence="all steps are committed", step=60)
    cluster.settle()
    assert cluster.holds(ConditionType.COMPLETE)
    assert cluster.condition(ConditionType.DEGRADED).reason == "RewardsEqual"


def test_an_attempt_that_ends_takes_its_forecast_with_it() -> None:
    cluster = running()
    leak = {"class": "RetainedGraph", "confidence": 0.8, "message": "tensors in use grow"}
    cluster.reports(4, memory_pressure={"diagnosis": leak, "role": "policy", "stepsLeft": 1})
    cluster.settle()
    cluster.end(CONTROLLER, 1, sentence="it broke", step=4)
    cluster.settle()
    assert not cluster.holds(ConditionType.MEMORY_PRESSURE)
