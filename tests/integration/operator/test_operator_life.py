"""The whole life of a job under the real operator: what its user sees, and what it costs the API server."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_api.exit_codes import ExitCode
from rljob_operator import labels
from rljob_operator.names import SHARED_ACCOUNT, controller_pod_name, worker_pod_name
from rljob_testing.operator.api_client import ApiClient
from rljob_testing.operator.eventually import eventually, holds_for
from rljob_testing.operator.fault_proxy import FaultProxy
from rljob_testing.operator.simulated_kubelet import CPU_NODE, GPU_NODE, SimulatedKubelet
from rljob_testing.operator.watched_job import WatchedJob
from tests.integration.operator.conftest import Kubectl

CONTROLLER, POLICY = controller_pod_name("job"), worker_pod_name("job", "policy", 0)


def test_a_job_runs_to_complete_and_tells_its_story(
    job: WatchedJob, proxy: FaultProxy, kubectl: Kubectl, namespace: str
) -> None:
    job.create()
    job.run(step=3)
    running = job.pods
    assert set(running) == {CONTROLLER, POLICY}
    assert {pod["spec"]["nodeName"] for pod in running.values()} == {CPU_NODE, GPU_NODE}
    assert running[CONTROLLER]["spec"]["nodeName"] == CPU_NODE
    eventually(lambda: job.status.get("step") == 3, "the reported step in the status", context=lambda: job.status)
    assert "3/10" in kubectl("get", "rlj").stdout

    job.complete()

    status = job.status
    assert (status["step"], status["steps"], status["display"]["phase"]) == (10, 10, "Complete")
    assert status["plan"]["generation"] == 1
    assert [attempt["number"] for attempt in status["attempts"]] == [1]
    assert {"startTime", "completionTime"} <= set(status)
    eventually(lambda: set(job.pods) == {CONTROLLER}, "the GPUs to be free and the controller's log to be kept")
    proxy.wait_until_quiet()
    writes = [str(write) for write in proxy.writes(namespace)]
    assert len(writes) < 40, writes
    eventually(lambda: "JobCompleted" in job.event_reasons(), "the Event", context=job.event_reasons)


WRITTEN_ONCE = (
    "patch rljobs",
    "create configmaps",
    "create services",
    "create secrets",
    "create stepreports",
    "create networkpolicies",
)


SHARED = ("create serviceaccounts", "create roles", "create rolebindings")
"""By the first job of a namespace."""


def test_few_writes_bring_a_job_to_running_and_none_keep_it_there(
    job: WatchedJob, proxy: FaultProxy, namespace: str
) -> None:
    job.kubelet.follow(namespace)
    job.create().wait_for(ConditionType.RUNNING)
    until_running = Counter(f"{write.verb} {write.resource}" for write in proxy.writes(namespace))
    assert set(until_running) == {*WRITTEN_ONCE, *SHARED, "create pods", "patch rljobs/status"}
    assert all(until_running[write] == 1 for write in (*WRITTEN_ONCE, *SHARED)), until_running
    assert until_running["create pods"] == 2
    # Two. On a busy machine it is also written when one pod is placed, one is ready, and both have been placed for 5 s.
    assert until_running["patch rljobs/status"] <= 5
    job.report(step=0)
    eventually(lambda: job.status.get("step") == 0, "the reported step in the status", context=lambda: job.status)
    proxy.wait_until_quiet()
    written = len(proxy.writes(namespace))
    holds_for(2.0, lambda: len(proxy.writes(namespace)) == written, "no write while nothing changes")


def test_children_are_labelled_owned_and_gone_with_their_job(job: WatchedJob, api: ApiClient, namespace: str) -> None:
    job.create().run()
    uid = job.object["metadata"]["uid"]
    kinds = ("pods", "services", "configmaps", "secrets", "networkpolicies", "stepreports")
    for kind in kinds:
        owned = api.list(kind, namespace, f"{labels.JOB_UID}={uid}")
        assert owned, kind
        for child in owned:
            [owner] = child["metadata"]["ownerReferences"]
            assert (owner["kind"], owner["uid"], owner["controller"]) == ("RLJob", uid, True)
            assert child["metadata"]["labels"]["app.kubernetes.io/instance"] == "job"
    job.delete()
    job.wait_gone()

    def left() -> list[str]:
        return [kind for kind in kinds if api.list(kind, namespace, f"{labels.JOB_UID}={uid}")]

    eventually(lambda: not left(), "nothing of the job left", context=left)


def test_fields_of_others_survive_in_our_objects(job: WatchedJob, api: ApiClient, namespace: str) -> None:
    """Server-side apply: what the operator wrote is its own, what a user added stays."""
    job.create().run()
    [service] = api.list("services", namespace, labels.JOB_NAME)
    name = service["metadata"]["name"]
    managers = {entry["manager"] for entry in service["metadata"]["managedFields"]}
    assert managers == {labels.FIELD_MANAGER}
    api.merge("services", name, {"metadata": {"labels": {"team": "rl"}}}, namespace)
    job.kubelet.vanish(job.policy_pod())
    eventually(lambda: len(job.attempts) == 2, "a second attempt, which applies the objects again")
    job.wait_for(ConditionType.RUNNING)
    assert api.get("services", name, namespace)["metadata"]["labels"]["team"] == "rl"


def test_a_suspended_job_has_no_pods_until_it_is_resumed(job: WatchedJob) -> None:
    job.create(suspend=True)
    job.wait_for(ConditionType.SUSPENDED)
    holds_for(1.0, lambda: not job.pods, "no pods of a suspended job")
    job.change(suspend=False)
    job.run()
    assert job.condition(ConditionType.SUSPENDED)["status"] == "False"


def test_suspending_a_running_job_ends_the_controller_before_the_workers(
    job: WatchedJob, kubelet: SimulatedKubelet, namespace: str
) -> None:
    job.create().run(step=4)
    kubelet.leave(namespace)
    job.change(suspend=True)
    eventually(lambda: "deletionTimestamp" in job.controller_pod()["metadata"], "the controller to be stopped")
    holds_for(1.0, lambda: "deletionTimestamp" not in job.policy_pod()["metadata"], "workers until the step commits")
    kubelet.follow(namespace)
    job.wait_for_pods(0)
    job.wait_for(ConditionType.SUSPENDED)
    job.change(suspend=False)
    eventually(lambda: len(job.attempts) == 2, "another attempt", context=lambda: job.attempts)
    job.wait_for(ConditionType.RUNNING)
    assert job.status.get("restarts", 0) == 0


def test_two_jobs_at_once_do_not_meet(
    job: WatchedJob, api: ApiClient, kubelet: SimulatedKubelet, namespace: str
) -> None:
    other = WatchedJob(api, kubelet, namespace, "other").create()
    job.create()
    for each in (job, other):
        each.run()
    other.end_controller(ExitCode.BAD_INPUT)
    other.wait_for(ConditionType.FAILED)
    job.complete()
    assert (job.phase, other.phase) == ("Complete", "Failed")


def test_a_failed_job_resumes_after_an_edit(job: WatchedJob, kubectl: Kubectl) -> None:
    job.create()
    job.run()
    job.end_controller(ExitCode.BAD_INPUT)
    job.wait_for(ConditionType.FAILED)
    job.change(ttlSecondsAfterFinished=86400)
    for type_ in ("Failed", "Stalled", "Ready=False"):
        kubectl("wait", "rljob/job", f"--for=condition={type_}", "--timeout=240s")
    job.change(retry=1)
    job.wait_for(ConditionType.RUNNING)
    assert [attempt["number"] for attempt in job.attempts] == [1, 2]
    for type_ in ("Ready", "Stalled=False", "Failed=False"):
        kubectl("wait", "rljob/job", f"--for=condition={type_}", "--timeout=240s")
    job.complete(attempt=2)


def test_more_steps_continue_a_complete_job(job: WatchedJob) -> None:
    job.create().run()
    job.complete()
    job.change(algorithm={"steps": 20})
    eventually(lambda: len(job.attempts) == 2, "another attempt", context=lambda: job.status)
    job.wait_for(ConditionType.RUNNING)
    job.complete(steps=20, attempt=2)
    assert job.status["steps"] == 20


def test_a_lost_worker_pod_begins_another_attempt_at_the_same_step(job: WatchedJob) -> None:
    job.create().run(step=4)
    first = {name: pod["metadata"]["uid"] for name, pod in job.pods.items()}
    job.kubelet.vanish(job.policy_pod())
    eventually(lambda: len(job.attempts) == 2, "another attempt", context=lambda: job.status)
    job.wait_for(ConditionType.RUNNING)
    second = {name: pod["metadata"]["uid"] for name, pod in job.pods.items()}
    assert set(first) == set(second)
    assert not set(first.values()) & set(second.values())
    assert job.attempts[0]["endTime"]
    job.complete(attempt=2)


@pytest.mark.parametrize(
    ("exit_code", "reason"),
    [(ExitCode.BAD_INPUT, ConditionReason.BAD_INPUT), (ExitCode.INVALID_MANIFEST, ConditionReason.TRAINER_ERROR)],
)
def test_what_another_try_cannot_help_fails_at_once_in_the_trainers_words(
    job: WatchedJob, exit_code: ExitCode, reason: ConditionReason
) -> None:
    job.create().run(step=0)
    job.end_controller(exit_code, step=0)
    failed = job.wait_for(ConditionType.FAILED)
    assert failed["reason"] == reason
    assert exit_code.meaning in failed["message"]
    assert len(job.attempts) == 1


def test_a_step_that_does_not_come_is_told_of_and_waited_for(job: WatchedJob) -> None:
    job.create().run()
    job.report(3, updateTime=(datetime.now(UTC) - timedelta(hours=1)).isoformat())
    overdue = job.wait_for(ConditionType.RUNNING, reason=ConditionReason.STEP_OVERDUE)
    assert overdue["message"].startswith("step 4 (rollout) is overdue: the trainer has reported nothing since ")
    job.report(4, updateTime=datetime.now(UTC).isoformat())
    job.wait_for(ConditionType.RUNNING, reason=ConditionReason.STEPS_COMMITTED)
    assert len(job.attempts) == 1


def test_restarts_without_progress_end_with_an_account_of_them(job: WatchedJob) -> None:
    job.create(recovery={"maxRestarts": 1}).run(step=0)
    job.end_controller(ExitCode.ERROR, step=0)
    eventually(lambda: len(job.attempts) == 2, "a restart", context=lambda: job.status)
    job.wait_for(ConditionType.RUNNING)
    job.end_controller(ExitCode.ERROR, step=0)
    assert job.wait_for(ConditionType.FAILED)["reason"] == ConditionReason.RESTARTS_EXHAUSTED


def test_a_finished_job_is_deleted_when_its_time_to_live_is_over(job: WatchedJob) -> None:
    job.create(ttlSecondsAfterFinished=3600).run()
    job.complete()
    job.change(ttlSecondsAfterFinished=1)  # later, so that it cannot be gone before it is seen to be complete
    job.wait_gone()


def test_a_job_that_runs_too_long_fails(job: WatchedJob) -> None:
    job.create().run()
    started = datetime.fromisoformat(job.status["startTime"])
    job.change(activeDeadlineSeconds=round((datetime.now(UTC) - started).total_seconds()) + 2)
    assert job.wait_for(ConditionType.FAILED)["reason"] == ConditionReason.DEADLINE_EXCEEDED
    eventually(lambda: POLICY not in job.pods, "the workers to be gone")


def test_objects_that_running_pods_need_are_created_again(job: WatchedJob, api: ApiClient, namespace: str) -> None:
    job.create().run(step=2)
    names = {
        "services": "job-controller",
        "configmaps": "job-rljob",
        "serviceaccounts": SHARED_ACCOUNT,
        "roles": SHARED_ACCOUNT,
        "rolebindings": SHARED_ACCOUNT,
        "stepreports": "job",  # last: its deletion is seen at once, that of the others within half an hour
    }
    deleted = {resource: api.get(resource, name, namespace)["metadata"]["uid"] for resource, name in names.items()}
    for resource, name in names.items():
        api.delete(resource, name, namespace)

    def still_gone() -> list[str]:
        found = {resource: api.find(resource, name, namespace) for resource, name in names.items()}
        return [resource for resource, obj in found.items() if not obj or obj["metadata"]["uid"] == deleted[resource]]

    eventually(lambda: not still_gone(), "new objects", context=still_gone)
    job.complete()
