"""Failures of an attempt and the response: counted and uncounted restarts, giving up."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from rljob_api.conditions import ConditionType
from rljob_api.exit_codes import ExitCode
from rljob_api.status import Role
from rljob_api.step_report import Evidence
from rljob_operator.reconcile.desired import Desired
from rljob_testing.simulated_cluster import CONTROLLER, POLICY_0, POLICY_1, SimulatedCluster, created_job, running_job


def job(steps: int = 60, **recovery: int) -> SimulatedCluster:
    return running_job(recovery=recovery, steps=steps)


def fail(cluster: SimulatedCluster, step: int = 0) -> None:
    cluster.end(CONTROLLER, 1, sentence="it broke", step=step)


@pytest.mark.parametrize(
    ("code", "reason"),
    [(ExitCode.ERROR, "Error"), (ExitCode.OUTPUT_UNAVAILABLE, "OutputUnavailable"), (137, "Error"), (42, "Error")],
)
def test_a_failure_that_may_pass_is_a_counted_restart(code: int, reason: str) -> None:
    cluster = running_job().end(CONTROLLER, code, sentence="what happened, and what to do", step=3)
    cluster.round()
    cluster.expect(reason=reason, exit_code=code, to_step=3, message="what happened, and what to do")
    cluster.expect(phase="Recovering", restarts=1, recovering_says="what happened, and what to do (restart 1 of 3)")
    cluster.next_attempt_runs().expect(number=2, from_step=4, phase="Running", recovering="Recovered")


@pytest.mark.parametrize(
    ("code", "reason"), [(ExitCode.BAD_INPUT, "BadInput"), (ExitCode.INVALID_MANIFEST, "TrainerError")]
)
def test_bad_input_fails_the_job_with_the_trainers_message(code: ExitCode, reason: str) -> None:
    cluster = running_job().end(CONTROLLER, code, sentence="the task has no reward: write spec.task.reward")
    cluster.settled(phase="Failed", failed=reason)
    cluster.expect(failed_says="the task has no reward: write spec.task.reward. The job resumes after")
    cluster.finish_deletions().expect(pods={CONTROLLER})
    assert cluster.settle() == Desired()


def test_exhausted_restarts_fail_the_job_with_an_account() -> None:
    cluster = job(maxRestarts=2)
    for _ in range(2):
        fail(cluster)
        cluster.next_attempt_runs()
    cluster.end(CONTROLLER, 83, sentence="rank 1 died", step=0).tick(20)
    cluster.settled(failed="RestartsExhausted", recovering="GivenUp")
    account = "all restarts are used, recovery.maxRestarts is 2; earlier attempts: 1: Error, 2: Error"
    cluster.expect(failed_says=f"attempt 3 failed: rank 1 died ({account})")


def test_progress_gives_restarts_back_and_only_the_latest_attempts_stay() -> None:
    cluster = job(steps=1000, maxRestarts=1)
    for failures in range(1, 26):
        fail(cluster, step=10 * failures)
        cluster.next_attempt_runs().expect(restarts=1)
    assert [attempt.number for attempt in cluster.stored.attempts] == list(range(7, 27))
    fail(cluster, step=cluster.attempt.from_step + 8)
    cluster.settled(failed="RestartsExhausted")


def test_half_of_the_remaining_steps_give_a_restart_back() -> None:
    cluster = job(steps=8, maxRestarts=1)
    fail(cluster, step=4)
    cluster.next_attempt_runs()
    fail(cluster, step=6)
    cluster.settled(phase="Recovering")


def test_restarts_without_progress_back_off_to_five_minutes() -> None:
    cluster = job(maxRestarts=20)
    waits = []
    for _ in range(7):
        fail(cluster)
        cluster.stop().expect(scheduled="WaitingToRestart")
        waits.append(cluster.last.requeue_after_seconds or 0)
        cluster.tick(waits[-1]).run()
    assert waits == [10, 20, 40, 80, 160, 300, 300]


def test_the_next_attempt_starts_once_all_old_pods_are_gone() -> None:
    cluster = job()
    fail(cluster, step=5)
    cluster.settled(pods={POLICY_0, POLICY_1}, deleting={POLICY_0, POLICY_1})
    cluster.tick(3600).settled(number=1)
    cluster.vanish(POLICY_0).settled(number=1)
    cluster.vanish(POLICY_1)
    cluster.settled(number=2, pods={CONTROLLER, POLICY_0, POLICY_1})  # at once, after progress


def test_a_worker_killed_for_host_memory_is_named_with_its_limit() -> None:
    template = {"spec": {"containers": [{"name": "rljob", "resources": {"limits": {"memory": "8Gi"}}}]}}
    cluster = running_job(policy={"replicas": 2, "template": template}).end(POLICY_1, 137, reason="OOMKilled")
    cluster.end(CONTROLLER, ExitCode.WORKER_LOST, sentence="policy-1 is gone")
    cluster.round()
    cluster.expect(reason="HostOutOfMemory", restarts=1)
    cluster.expect(message_says="pod demo-policy-1 (policy) was OOMKilled")
    cluster.expect(message_says="its limit is 8Gi: raise resources.limits.memory of container rljob")
    cluster.expect(message_says="in spec.policy.template, or recovery.maxHostMemory")


@pytest.mark.parametrize(
    ("role", "pod", "template"),
    [
        (None, CONTROLLER, "controller"),
        ("rollout", POLICY_1, "policy"),
        ("policy", POLICY_1, "policy"),
        ("controller", CONTROLLER, "controller"),
    ],
)
def test_advice_names_the_template_of_the_failed_process(role: Role | None, pod: str, template: str) -> None:
    cluster = running_job()
    if role:
        evidence = Evidence(time=cluster.now, attempt=1, role=role, rank=1, step=4, message="low on memory")
        cluster.end(CONTROLLER, ExitCode.HOST_OUT_OF_MEMORY, sentence="low on memory.", step=3, evidence=evidence)
    else:
        cluster.end(CONTROLLER, 137, reason="OOMKilled")
    cluster.round()
    advice = f"set resources.limits.memory of container rljob in spec.{template}.template"
    cluster.expect(reason="HostOutOfMemory", message_says=f"pod {pod}")
    cluster.expect(message_says=f"it has no memory limit, so its node ran out of memory: {advice}")


def a_worker_fails(cluster: SimulatedCluster) -> None:
    cluster.end(POLICY_0, 1, text="Traceback: boom")


def the_controller_loses_a_worker(cluster: SimulatedCluster) -> None:
    cluster.end(CONTROLLER, ExitCode.WORKER_LOST, sentence="policy-0 died while updating", step=4)


def the_controller_runs_out(cluster: SimulatedCluster) -> None:
    cluster.end(CONTROLLER, ExitCode.DEVICE_OUT_OF_MEMORY, sentence="policy-0 ran out of GPU memory", step=4)


def another_worker_follows(cluster: SimulatedCluster) -> None:
    cluster.end(POLICY_1, ExitCode.WORKER_LOST).settled(reason=None)
    cluster.end(POLICY_0, 137, reason="OOMKilled")


def the_worker_reports_a_kill(cluster: SimulatedCluster) -> None:
    cluster.end(POLICY_0, ExitCode.HOST_OUT_OF_MEMORY, sentence="the kernel killed 1 of this container's processes")


@pytest.mark.parametrize(
    ("first", "then", "reason", "message"),
    [
        (a_worker_fails, the_controller_runs_out, "DeviceOutOfMemory", "policy-0 ran out of GPU memory"),
        (a_worker_fails, None, "Error", "demo-policy-0 exited with code 1"),
        (a_worker_fails, None, "Error", "boom"),
        (the_controller_loses_a_worker, another_worker_follows, "HostOutOfMemory", "OOMKilled"),
        (the_controller_loses_a_worker, the_worker_reports_a_kill, "HostOutOfMemory", "the kernel killed 1"),
        (the_controller_loses_a_worker, None, "WorkerLost", "policy-0 died while updating"),
        (lambda it: it.end(CONTROLLER, 83), None, "WorkerLost", "code 83 (a policy rank or a rollout engine died"),
    ],
)
def test_pods_have_a_moment_to_report_the_cause(first: Any, then: Any, reason: str, message: str) -> None:
    cluster = running_job().tick(60)
    first(cluster)
    cluster.settled(reason=None, wait=20)
    cluster.tick(3 if then else 20)
    if then:
        then(cluster)
    cluster.round()
    cluster.expect(reason=reason, message_says=message)
    assert then is not the_worker_reports_a_kill or cluster.attempt.diagnosis is not None
    if first is a_worker_fails and then is None:
        cluster.round()
        cluster.expect(deleting={CONTROLLER})


@pytest.mark.parametrize(
    "disruption",
    ["PreemptionByScheduler", "EvictionByEvictionAPI", "DeletionByTaintManager", "Evicted", "NodeLost", None],
)
def test_a_pod_that_the_cluster_takes_away_costs_no_restart(disruption: str | None) -> None:
    """None: the kubelet rejected it."""
    cluster = job(maxRestarts=0)
    cluster.change_pod(POLICY_0, disruption=disruption, phase="Failed", end=None)
    cluster.settled(restarts=0, recovering="PodsDisrupted", recovering_says=disruption or "demo-policy-0")
    cluster.next_attempt_runs().expect(phase="Running", number=2)


def test_a_drained_worker_ends_the_controller_first() -> None:
    cluster = running_job().delete_pod(POLICY_0).settled(deleting={POLICY_0, CONTROLLER})
    cluster.reports(7).end(CONTROLLER, ExitCode.TERMINATED, sentence="stopped by SIGTERM", step=7).settled()
    assert cluster.pods[POLICY_1].deleting
    cluster.next_attempt_runs().expect(from_step=8, restarts=0)
    first = cluster.stored.attempts[0]
    assert (first.to_step, first.exit_code) == (7, 143)


def test_a_vanished_pod_ends_the_attempt_once_all_were_placed() -> None:
    cluster = created_job().vanish(POLICY_1).settled(number=1, pods={CONTROLLER, POLICY_0, POLICY_1})
    cluster.run().vanish(POLICY_1).settled(reason="PodsDisrupted", message="pod demo-policy-1 is gone")


def test_out_of_memory_is_never_taken_for_a_disruption() -> None:
    cluster = running_job().delete_pod(POLICY_0)
    cluster.end(CONTROLLER, ExitCode.DEVICE_OUT_OF_MEMORY, sentence="policy-1 ran out of GPU memory")
    cluster.round()
    cluster.expect(reason="DeviceOutOfMemory", restarts=1)


def test_the_time_of_a_condition_changes_only_with_its_status() -> None:
    cluster = running_job()
    running_since = cluster.condition(ConditionType.RUNNING).last_transition_time
    cluster.tick(100)
    cluster.facts = {"step_report_problem": "step: not a number"}
    cluster.settled(running="StepReportIgnored")
    assert cluster.condition(ConditionType.RUNNING).last_transition_time == running_since
    cluster.end(CONTROLLER, 1)
    cluster.round()
    assert cluster.condition(ConditionType.RUNNING).last_transition_time == running_since + timedelta(seconds=100)
