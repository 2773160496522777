"""Memory runs out, the plan is changed, and the job goes on; or it says what stands in the way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_api.conditions import ConditionType
from rljob_api.exit_codes import ExitCode
from rljob_testing.simulated_cluster import (
    CONTROLLER,
    CPU_NODE,
    GPU_NODE,
    PLAN,
    POLICY_0,
    POLICY_1,
    SimulatedCluster,
    job_spec,
)
from tests.unit.operator.reconcile.memory_failures import (
    FACTS,
    FRAGMENTED,
    GIB,
    evidence,
    out_of_device_memory,
    running,
    status_of,
    trainers_change,
)

# --- a changed plan ---


def test_the_changed_plan_is_written_down_before_anything_acts_on_it() -> None:
    cluster = running()
    out_of_device_memory(cluster)
    desired = cluster.round()
    assert (desired.apply, desired.create, desired.delete_pods) == ((), (), ())
    plan, (change,) = status_of(cluster).plan, status_of(cluster).plan_changes
    assert plan is not None
    assert (plan.generation, change.generation, change.attempt, change.step) == (2, 2, 1, 4)
    assert plan.model_copy(update={"generation": 1}) != PLAN
    assert (change.phase, change.role, change.rank, change.level) == ("update", "policy", 1, "ReplacePods")


def test_an_out_of_memory_job_restarts_at_once_under_a_new_plan() -> None:
    cluster = running(step=0)
    out_of_device_memory(cluster, step=0)
    cluster.settle()
    assert cluster.phase == "Recovering"
    recovering = cluster.condition(ConditionType.RECOVERING)
    assert recovering.reason == "MemoryPlanChanged"
    assert "6.10 GiB" in recovering.message
    assert recovering.message.endswith("(adjustment 1 of 6)")
    first = cluster.attempt
    assert first.diagnosis is not None
    assert (first.reason, first.message) == ("DeviceOutOfMemory", "policy-1 ran out")
    for _ in range(3):
        cluster.finish_deletions()
        cluster.settle()
    assert (cluster.attempt.number, cluster.attempt.plan_generation) == (2, 2), "no delay, though no step was committed"
    assert (status_of(cluster).adjustments, status_of(cluster).restarts) == (1, 0)
    assert status_of(cluster).attempts[0].remedy == status_of(cluster).plan_changes[0].remedy
    last = status_of(cluster).last_out_of_memory
    assert last is not None
    assert (last.step, last.diagnosis) == (1, first.diagnosis)


def test_events_tell_the_failure_the_change_and_the_recovery() -> None:
    cluster = running()
    cluster.events.clear()
    out_of_device_memory(cluster)
    cluster.next_attempt_runs()
    cluster.reports(4)
    cluster.settle()
    assert cluster.events == ["OutOfMemory", "PlanChanged", "AttemptStarted", "Recovered"]
    (change,) = status_of(cluster).plan_changes
    assert change.seconds_to_recover == (cluster.now - change.time).total_seconds() > 0


@pytest.mark.parametrize(("failures", "most"), [(1, 0), (3, 2)])
def test_exhausted_adjustments_fail_the_job_with_an_account(failures: int, most: int) -> None:
    cluster = running(recovery={"maxAdjustments": most})
    for _ in range(failures):
        out_of_device_memory(cluster)
        cluster.next_attempt_runs()
    failed = cluster.condition(ConditionType.FAILED)
    assert failed.reason == "AdjustmentsExhausted"
    for change in status_of(cluster).plan_changes:
        assert f"generation {change.generation}" in failed.message
    assert len(status_of(cluster).plan_changes) == most
    assert cluster.condition(ConditionType.RECOVERING).reason == "GivenUp"


def test_progress_gives_adjustments_back() -> None:
    cluster = running(recovery={"maxAdjustments": 1}, steps=1000)
    for step in (20, 40, 60):
        out_of_device_memory(cluster, step=step)
        cluster.next_attempt_runs()
        assert status_of(cluster).adjustments == 1
    out_of_device_memory(cluster, step=62)
    cluster.settle()
    assert cluster.condition(ConditionType.FAILED).reason == "AdjustmentsExhausted"


def test_a_pinned_setting_in_the_way_is_named_with_what_to_write() -> None:
    cluster = SimulatedCluster(spec=job_spec(memory={"detachMetrics": "Disabled"})).run()
    cluster.reports(3, plan=PLAN.model_copy(update={"detach_metrics": False}))
    kept_graphs = {"class": "RetainedGraph", "confidence": 0.9, "message": "tensors in use grow with every step"}
    words = evidence(cluster, diagnoses=[kept_graphs])
    cluster.end(CONTROLLER, ExitCode.DEVICE_OUT_OF_MEMORY, sentence="policy-1 ran out", step=3, evidence=words)
    cluster.settle()
    failed = cluster.condition(ConditionType.FAILED)
    assert failed.reason == "PinnedSettingConflict"
    assert "memory.detachMetrics is pinned to Disabled: write Enabled, or Auto" in failed.message
    assert status_of(cluster).restarts == 0


def test_a_fixed_plan_makes_a_failure_an_explained_restart() -> None:
    cluster = running(memory={"mode": "Disabled"})
    out_of_device_memory(cluster)
    cluster.settle()
    assert (status_of(cluster).restarts, status_of(cluster).adjustments) == (1, 0)
    assert cluster.condition(ConditionType.RECOVERING).reason == "SamePlanRestart"
    assert status_of(cluster).plan == PLAN
    assert cluster.attempt.diagnosis is not None
    assert status_of(cluster).last_out_of_memory is not None


def test_a_trainer_that_dies_before_it_has_a_plan_is_restarted() -> None:
    cluster = SimulatedCluster().run()
    cluster.end(CONTROLLER, ExitCode.DEVICE_OUT_OF_MEMORY, sentence="ran out while loading")
    cluster.settle()
    assert (status_of(cluster).restarts, status_of(cluster).plan) == (1, None)


# --- what the pods are given ---


def test_a_worker_killed_for_its_memory_gets_more_within_the_bound() -> None:
    cluster = running(limit="8Gi", recovery={"maxHostMemory": "10Gi"})
    cluster.end(POLICY_1, 137, reason="OOMKilled")
    cluster.end(CONTROLLER, ExitCode.WORKER_LOST, sentence="policy-1 is gone")
    cluster.next_attempt_runs()
    assert {pod.memory_limit_bytes for pod in cluster.pods.values()} == {None, 10 * GIB}
    diagnosis = status_of(cluster).attempts[0].diagnosis
    assert diagnosis is not None
    assert (diagnosis.class_name, diagnosis.numbers["limit_bytes"]) == ("HostMemory", 8 * GIB)
    assert status_of(cluster).plan_changes[0].phase == "update"


def test_without_a_host_memory_bound_the_account_names_it() -> None:
    cluster = running(limit="8Gi", recovery={"maxRestarts": 1})
    for _ in range(2):
        cluster.end(POLICY_1, 137, reason="OOMKilled")
        cluster.next_attempt_runs()
    failed = cluster.condition(ConditionType.FAILED)
    assert failed.reason == "RestartsExhausted"
    assert "recovery.maxHostMemory is absent, so the limit of 8.00 GiB stays: write 12Gi" in failed.message


def test_a_predicted_limit_is_raised_without_a_bound() -> None:
    cluster = running(model={"uri": "hf://Qwen/Qwen3-8B"})
    before = cluster.pods[POLICY_1].memory_limit_bytes
    assert before is not None, "the operator's own"
    cluster.end(POLICY_1, 137, reason="OOMKilled")
    cluster.next_attempt_runs()
    assert cluster.pods[POLICY_1].memory_limit_bytes == before * 3 // 2


def test_a_predicted_limit_is_doubled_at_most_over_all_attempts() -> None:
    cluster = running(model={"uri": "hf://Qwen/Qwen3-8B"}, recovery={"maxRestarts": 1})
    predicted, limits = cluster.pods[POLICY_1].memory_limit_bytes, list[int | None]()
    assert predicted is not None
    for _ in range(3):
        cluster.end(POLICY_1, 137, reason="OOMKilled")
        cluster.next_attempt_runs()
        limits.append(cluster.pods[POLICY_1].memory_limit_bytes)
    assert limits == [predicted * 3 // 2, 2 * predicted, 2 * predicted]
    cluster.end(POLICY_1, 137, reason="OOMKilled")
    cluster.settle()
    assert "recovery.maxHostMemory is absent" in cluster.condition(ConditionType.FAILED).message


def test_a_worker_without_a_limit_is_told_so_and_its_plan_stays() -> None:
    """Its node ran out of memory: a larger limit in the plan would change nothing."""
    cluster = running(recovery={"maxHostMemory": "512Gi", "maxRestarts": 1})
    assert cluster.pods[POLICY_1].memory_limit_bytes is None
    for _ in range(2):
        cluster.end(POLICY_1, 137, reason="OOMKilled")
        cluster.next_attempt_runs()
    assert not status_of(cluster).plan_changes
    assert "the policy's container has no memory limit" in cluster.condition(ConditionType.FAILED).message


def test_a_limit_below_the_prediction_is_a_condition_and_no_refusal() -> None:
    cluster = running(limit="8Gi", model={"uri": "hf://Qwen/Qwen3-8B"})
    condition = cluster.condition(ConditionType.MEMORY_PRESSURE)
    assert (condition.status, condition.reason) == ("False", "LimitBelowPrediction")
    assert "in spec.policy.template" in condition.message
    assert "found 8.00 GiB" in condition.message


def test_a_full_dev_shm_is_made_larger() -> None:
    cluster = running(recovery={"maxSharedMemory": "64Gi"})
    before = cluster.pods[POLICY_0].shared_memory_bytes
    cluster.end(CONTROLLER, ExitCode.SHARED_MEMORY_EXHAUSTED, sentence="/dev/shm is full", step=3)
    cluster.next_attempt_runs()
    assert before is not None
    assert cluster.pods[POLICY_0].shared_memory_bytes == 2 * before
    assert status_of(cluster).attempts[0].diagnosis is not None


def test_the_dev_shm_of_the_pod_with_the_process_is_made_larger() -> None:
    small = {"name": "shm", "emptyDir": {"sizeLimit": "600Mi"}}
    policy = {"replicas": 2, "template": {"spec": {"volumes": [small]}}}
    cluster = running(policy=policy, recovery={"maxSharedMemory": "4Gi"})
    words = evidence(cluster, rank=1, phase=None, message="found 480 MiB in /dev/shm")
    cluster.end(CONTROLLER, ExitCode.SHARED_MEMORY_EXHAUSTED, sentence="too small", step=3, evidence=words)
    cluster.next_attempt_runs()
    assert cluster.pods[POLICY_0].shared_memory_bytes == 1200 << 20


def test_a_dev_shm_that_the_memory_limit_keeps_small_grows_with_it() -> None:
    """The kubelet makes it no larger than the pod's memory: a larger sizeLimit would change nothing."""
    cluster = running(limit="720Mi", recovery={"maxHostMemory": "4Gi", "maxSharedMemory": "8Gi"})
    words = evidence(cluster, rank=1, phase=None, message="found 576 MiB in /dev/shm")
    cluster.end(CONTROLLER, ExitCode.SHARED_MEMORY_EXHAUSTED, sentence="too small", step=3, evidence=words)
    cluster.next_attempt_runs()
    assert cluster.pods[POLICY_0].memory_limit_bytes == 1080 << 20
    assert cluster.attempt.diagnosis is None
    assert status_of(cluster).plan_changes[-1].diagnosis.class_name == "SharedMemory"


def test_unplaced_pods_name_the_nodes_excluded_by_the_plan() -> None:
    cluster = SimulatedCluster()
    cluster.settle()
    plan = PLAN.model_copy(update={"excluded_nodes": ["gpu-7"]})
    cluster.set_status(status_of(cluster).model_copy(update={"plan": plan}))
    cluster.unschedulable("0/2 nodes are available", POLICY_0)
    cluster.settle()
    message = cluster.condition(ConditionType.SCHEDULED).message
    assert message.endswith("0/2 nodes are available; the memory plan excludes gpu-7: add another node")


def test_the_only_node_that_has_the_gpus_is_not_left() -> None:
    stranger = FRAGMENTED.replace("78.00 GiB", "8.00 GiB").replace("60.00 GiB", "6.00 GiB").replace("6.10", "1.00")
    for other in ((), (replace(GPU_NODE, name="gpu-2"),)):
        cluster = SimulatedCluster(nodes=(CPU_NODE, GPU_NODE, *other)).run()
        cluster.reports(3, memory_profile=FACTS, phase="update")
        cluster.settle()
        for _ in range(2):
            words = evidence(cluster, attempt=cluster.attempt.number, message=stranger)
            cluster.end(CONTROLLER, ExitCode.DEVICE_OUT_OF_MEMORY, sentence="ran out", step=3, evidence=words)
            cluster.next_attempt_runs()
        plan = status_of(cluster).plan
        assert plan is not None
        assert bool(plan.excluded_nodes) == bool(other)


# --- evidence ---


def test_the_step_report_replaces_a_missing_termination_message() -> None:
    cluster = running()
    cluster.reports(3, last_evidence=evidence(cluster, rank=0))
    cluster.end(CONTROLLER, ExitCode.DEVICE_OUT_OF_MEMORY)
    cluster.settle()
    (change,) = status_of(cluster).plan_changes
    assert (change.rank, change.diagnosis.class_name) == (0, "Fragmentation")


def test_an_exit_code_of_memory_outweighs_an_unrelated_message() -> None:
    cluster = running()
    nobody_knows = {"class": "Unknown", "confidence": 0.5, "message": "memory ran out"}
    words = evidence(cluster, message="found 10 MiB, expected more", diagnoses=[nobody_knows])
    cluster.end(CONTROLLER, ExitCode.SHARED_MEMORY_EXHAUSTED, sentence="too small", evidence=words)
    cluster.settle()
    diagnosis = cluster.attempt.diagnosis
    assert diagnosis is not None
    assert (diagnosis.class_name, diagnosis.message) == ("SharedMemory", "found 10 MiB, expected more")


def test_a_handled_failures_message_is_not_read_again() -> None:
    cluster = running()
    words, change = evidence(cluster, rank=0), trainers_change(cluster)
    plan = PLAN.model_copy(update={"generation": 2, "micro_batch_tokens": 2048})
    cluster.reports(3, last_evidence=words, plan=plan, plan_changes=[change])
    cluster.settle()
    cluster.tick(5)
    cluster.end(POLICY_1, ExitCode.SHARED_MEMORY_EXHAUSTED, text="No space left on device")
    cluster.settle()
    diagnosis = cluster.attempt.diagnosis
    assert diagnosis is not None
    assert diagnosis.class_name == "SharedMemory"
