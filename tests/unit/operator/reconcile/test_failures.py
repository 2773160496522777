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


def fail(cluster: SimulatedCluster, step: int = 0) -> SimulatedCluster:
    return cluster.end(CONTROLLER, 1, message="it broke", step=step).settled()


@pytest.mark.parametrize(
    ("code", "reason"),
    [(ExitCode.ERROR, "Error"), (ExitCode.OUTPUT_UNAVAILABLE, "OutputUnavailable"), (137, "Error"), (42, "Error")],
)
def test_a_failure_that_may_pass_is_a_counted_restart(code: int, reason: str) -> None:
    cluster = running_job().end(CONTROLLER, code, message="what happened, and what to do", step=3)
    cluster.settled(reason=reason, exit_code=code, to_step=3, message="what happened, and what to do")
    cluster.expect(phase="Recovering", restarts=1, recovering_contains="what happened, and what to do (restart 1 of 3)")
    cluster.next_attempt_runs().expect(number=2, from_step=4, phase="Running", recovering="Recovered")


@pytest.mark.parametrize(
    ("code", "reason"), [(ExitCode.BAD_INPUT, "BadInput"), (ExitCode.INVALID_MANIFEST, "TrainerError")]
)
def test_bad_input_fails_the_job_with_the_trainers_message(code: ExitCode, reason: str) -> None:
    message = "the task has no reward: write spec.task.reward"
    cluster = running_job().end(CONTROLLER, code, message=message).settled(phase="Failed", failed=reason)
    cluster.expect(failed_contains=f"{message}. The job resumes after").finish_deletions().expect(pods={CONTROLLER})
    assert cluster.settle() == Desired()


def test_exhausted_restarts_fail_the_job_with_an_account() -> None:
    cluster = fail(fail(job(maxRestarts=2)).next_attempt_runs()).next_attempt_runs()
    cluster.end(CONTROLLER, 83, message="rank 1 died", step=0).tick(20)
    account = "all restarts are used, recovery.maxRestarts is 2; earlier attempts: 1: Error, 2: Error"
    cluster.settled(failed="RestartsExhausted", failed_contains=f"attempt 3 failed: rank 1 died ({account})")
    cluster.expect(recovering="GivenUp")


def test_progress_gives_restarts_back_and_only_the_latest_attempts_stay() -> None:
    cluster = job(steps=1000, maxRestarts=1)
    for failures in range(1, 26):
        fail(cluster, step=10 * failures).next_attempt_runs().expect(restarts=1)
    assert [attempt.number for attempt in cluster.stored.attempts] == list(range(7, 27))
    fail(cluster, step=cluster.attempt.from_step + 8).expect(failed="RestartsExhausted")
    few_steps = fail(job(steps=8, maxRestarts=1), step=4).next_attempt_runs()
    fail(few_steps, step=6).expect(phase="Recovering")  # half of the remaining steps are progress too


def test_restarts_without_progress_back_off_to_five_minutes() -> None:
    cluster = job(maxRestarts=20)
    waits = []
    for _ in range(7):
        fail(cluster).stop().expect(scheduled="WaitingToRestart")
        waits.append(cluster.last.requeue_after_seconds or 0)
        cluster.tick(waits[-1]).run()
    assert waits == [10, 20, 40, 80, 160, 300, 300]


def test_the_next_attempt_starts_once_all_old_pods_are_gone() -> None:
    workers = {POLICY_0, POLICY_1}
    cluster = fail(job(), step=5).expect(pods=workers, deleting=workers).tick(3600).settled(number=1)
    cluster.vanish(POLICY_0).settled(number=1)
    cluster.vanish(POLICY_1).settled(number=2, pods={CONTROLLER, *workers})  # at once, after progress


LIMITED = {"spec": {"containers": [{"name": "rljob", "resources": {"limits": {"memory": "8Gi"}}}]}}


def test_a_worker_killed_for_host_memory_is_named_with_its_limit() -> None:
    cluster = running_job(policy={"replicas": 2, "template": LIMITED}).end(POLICY_1, 137, reason="OOMKilled")
    cluster.end(CONTROLLER, ExitCode.WORKER_LOST, message="policy-1 is gone")
    cluster.settled(reason="HostOutOfMemory", restarts=1)
    advice = "raise resources.limits.memory of container rljob in spec.policy.template, or recovery.maxHostMemory"
    cluster.expect(message_contains=("pod demo-policy-1 (policy) was OOMKilled", f"its limit is 8Gi: {advice}"))


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
        cluster.end(CONTROLLER, ExitCode.HOST_OUT_OF_MEMORY, message="low on memory.", step=3, evidence=evidence)
    else:
        cluster.end(CONTROLLER, 137, reason="OOMKilled")
    no_limit = "it has no memory limit, so its node ran out of memory"
    advice = f"set resources.limits.memory of container rljob in spec.{template}.template"
    cluster.settled(reason="HostOutOfMemory", message_contains=(f"pod {pod}", f"{no_limit}: {advice}"))


def a_worker_fails(cluster: SimulatedCluster) -> None:
    cluster.end(POLICY_0, 1, text="Traceback: boom")


def the_controller_loses_a_worker(cluster: SimulatedCluster) -> None:
    cluster.end(CONTROLLER, ExitCode.WORKER_LOST, message="policy-0 died while updating", step=4)


def the_controller_runs_out(cluster: SimulatedCluster) -> None:
    cluster.end(CONTROLLER, ExitCode.DEVICE_OUT_OF_MEMORY, message="policy-0 ran out of GPU memory", step=4)


def another_worker_follows(cluster: SimulatedCluster) -> None:
    cluster.end(POLICY_1, ExitCode.WORKER_LOST).settled(reason=None).end(POLICY_0, 137, reason="OOMKilled")


def the_worker_reports_a_kill(cluster: SimulatedCluster) -> None:
    cluster.end(POLICY_0, ExitCode.HOST_OUT_OF_MEMORY, message="the kernel killed 1 of this container's processes")


@pytest.mark.parametrize(
    ("first", "then", "reason", "message"),
    [
        (a_worker_fails, the_controller_runs_out, "DeviceOutOfMemory", "policy-0 ran out of GPU memory"),
        (a_worker_fails, None, "Error", ("demo-policy-0 exited with code 1", "boom")),
        (the_controller_loses_a_worker, another_worker_follows, "HostOutOfMemory", "OOMKilled"),
        (the_controller_loses_a_worker, the_worker_reports_a_kill, "HostOutOfMemory", "the kernel killed 1"),
        (the_controller_loses_a_worker, None, "WorkerLost", "policy-0 died while updating"),
        (lambda it: it.end(CONTROLLER, 83), None, "WorkerLost", "code 83 (a policy rank or a rollout engine died"),
    ],
)
def test_pods_have_a_moment_to_report_the_cause(first: Any, then: Any, reason: str, message: Any) -> None:
    cluster = running_job().tick(60)
    first(cluster)
    cluster.settled(reason=None, wait=20).tick(3 if then else 20)
    if then:
        then(cluster)
    cluster.round()
    cluster.expect(reason=reason, message_contains=message)
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
    cluster = job(maxRestarts=0).change_pod(POLICY_0, disruption=disruption, phase="Failed", end=None)
    cluster.settled(restarts=0, recovering=(True, "PodsDisrupted"), recovering_contains=disruption or "demo-policy-0")
    cluster.next_attempt_runs().expect(phase="Running", number=2)


def test_a_drained_worker_ends_the_controller_first() -> None:
    cluster = running_job().delete_pod(POLICY_0).settled(deleting={POLICY_0, CONTROLLER}).reports(7)
    cluster.end(CONTROLLER, ExitCode.TERMINATED, message="stopped by SIGTERM", step=7).settle()
    assert cluster.pods[POLICY_1].deleting
    cluster.next_attempt_runs().expect(from_step=8, restarts=0)
    first = cluster.stored.attempts[0]
    assert (first.to_step, first.exit_code) == (7, 143)


def test_a_vanished_pod_ends_the_attempt_once_all_were_placed() -> None:
    cluster = created_job().vanish(POLICY_1).settled(number=1, pods={CONTROLLER, POLICY_0, POLICY_1})
    cluster.run().vanish(POLICY_1).settled(reason="PodsDisrupted", message="pod demo-policy-1 is gone")


def test_out_of_memory_is_never_taken_for_a_disruption() -> None:
    cluster = running_job().delete_pod(POLICY_0)
    the_controller_runs_out(cluster)
    cluster.settled(reason="DeviceOutOfMemory", restarts=1)


def test_the_time_of_a_condition_changes_only_with_its_status() -> None:
    cluster = running_job()
    running_since = cluster.condition(ConditionType.RUNNING).last_transition_time
    cluster.tick(100).observes(step_report_problem="step: not a number").settled(running="StepReportIgnored")
    assert cluster.condition(ConditionType.RUNNING).last_transition_time == running_since
    cluster.end(CONTROLLER, 1).settle()
    assert cluster.condition(ConditionType.RUNNING).last_transition_time == running_since + timedelta(seconds=100)
