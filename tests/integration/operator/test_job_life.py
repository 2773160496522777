"""The whole life of a job under the real operator: what its user sees, and what it costs the API server."""

from __future__ import annotations

from collections import Counter

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_api.exit_codes import ExitCode
from rljob_cluster.control_plane import ControlPlane
from rljob_operator import labels
from rljob_operator.names import CONTROLLER_SERVICE, SHARED_ACCOUNT, controller_pod_name, worker_pod_name
from rljob_testing.operator.api_client import ResourceClient
from rljob_testing.operator.fault_proxy import FaultProxy
from rljob_testing.operator.operator_process import OperatorProcess, forget_leader
from rljob_testing.operator.simulated_kubelet import CPU_NODE, GPU_NODE, SimulatedKubelet
from rljob_testing.operator.watched_job import WatchedJob
from rljob_testing.patience import eventually, holds_for
from tests.integration.operator.conftest import Kubectl, NewJob

CONTROLLER, POLICY = controller_pod_name("job"), worker_pod_name("job", "policy", 0)
WRITTEN_ONCE = (
    *("patch rljobs", "create configmaps", "create secrets", "create stepreports", "create networkpolicies"),
    # By the first job of a namespace.
    *("create serviceaccounts", "create roles", "create rolebindings", "create services"),
)
CHILDREN = ("pods", "configmaps", "secrets", "networkpolicies", "stepreports")


def wait_for_attempt(job: WatchedJob, number: int) -> None:
    """Wait until the pods of the attempt run."""
    eventually(lambda: job.attempt == number, f"attempt {number}", context=lambda: job.status)
    job.wait_for(ConditionType.RUNNING)


def test_a_job_runs_to_complete_and_leaves_nothing_when_it_expires(
    job: WatchedJob, api: ResourceClient, proxy: FaultProxy, kubectl: Kubectl, namespace: str
) -> None:
    job.create().run(step=3)
    uid = job.object["metadata"]["uid"]
    assert {name: pod["spec"]["nodeName"] for name, pod in job.pods.items()} == {CONTROLLER: CPU_NODE, POLICY: GPU_NODE}
    eventually(lambda: job.status.get("step") == 3, "the reported step in the status", context=lambda: job.status)
    assert "3/10" in kubectl("get", "rlj").stdout
    for kind in CHILDREN:
        owned = api.list(kind, namespace, f"{labels.JOB_UID}={uid}")
        assert owned, kind
        for child in owned:
            [owner] = child["metadata"]["ownerReferences"]
            assert (owner["kind"], owner["uid"], owner["controller"]) == ("RLJob", uid, True)
            assert child["metadata"]["labels"]["app.kubernetes.io/instance"] == "job"

    job.complete()

    status = job.status
    assert (status["step"], status["steps"], status["display"]["phase"]) == (10, 10, "Complete")
    assert status["plan"]["generation"] == 1
    assert {"startTime", "completionTime"} <= set(status)
    eventually(lambda: set(job.pods) == {CONTROLLER}, "the GPUs to be free and the controller's log to be kept")
    proxy.wait_until_quiet()
    writes = [str(write) for write in proxy.writes(namespace)]
    assert len(writes) < 40, writes
    eventually(lambda: "JobCompleted" in job.event_reasons(), "the Event", context=job.event_reasons)

    job.change(algorithm={"steps": 20})
    wait_for_attempt(job, 2)
    job.complete(steps=20, attempt=2)
    assert job.status["steps"] == 20

    job.change(ttlSecondsAfterFinished=1)
    job.wait_gone()

    def left() -> list[str]:
        return [kind for kind in CHILDREN if api.list(kind, namespace, f"{labels.JOB_UID}={uid}")]

    eventually(lambda: not left(), "nothing of the job left", context=left)


def test_few_writes_bring_a_job_to_running_and_none_keep_it_there(
    job: WatchedJob, proxy: FaultProxy, namespace: str
) -> None:
    job.kubelet.follow(namespace)
    job.create().wait_for(ConditionType.RUNNING)
    until_running = Counter(f"{write.verb} {write.resource}" for write in proxy.writes(namespace))
    assert set(until_running) == {*WRITTEN_ONCE, "create pods", "patch rljobs/status"}
    assert all(until_running[write] == 1 for write in WRITTEN_ONCE), until_running
    assert until_running["create pods"] == 2
    # Two. On a busy machine it is also written when one pod is placed, one is ready, and both have been placed for 5 s.
    assert until_running["patch rljobs/status"] <= 5
    job.report(step=0)
    eventually(lambda: job.status.get("step") == 0, "the reported step in the status", context=lambda: job.status)
    proxy.wait_until_quiet()
    written = len(proxy.writes(namespace))
    holds_for(2.0, lambda: len(proxy.writes(namespace)) == written, "no write while nothing changes")


def test_a_lost_worker_pod_begins_another_attempt_and_fields_of_others_stay(
    job: WatchedJob, api: ResourceClient, namespace: str
) -> None:
    job.create().run(step=4)
    first = {name: pod["metadata"]["uid"] for name, pod in job.pods.items()}
    [policy] = api.list("networkpolicies", namespace, labels.JOB_NAME)
    name = policy["metadata"]["name"]
    assert {entry["manager"] for entry in policy["metadata"]["managedFields"]} == {labels.FIELD_MANAGER}
    api.merge("networkpolicies", name, {"metadata": {"labels": {"team": "rl"}}}, namespace)
    job.kubelet.vanish(job.policy_pod())
    wait_for_attempt(job, 2)
    second = {name: pod["metadata"]["uid"] for name, pod in job.pods.items()}
    assert first.keys() == second.keys()
    assert set(first.values()).isdisjoint(second.values())
    assert job.attempts[0]["endTime"]
    assert api.get("networkpolicies", name, namespace)["metadata"]["labels"]["team"] == "rl"
    job.complete(attempt=2)


def test_suspending_a_job_ends_the_controller_before_the_workers(
    job: WatchedJob, kubelet: SimulatedKubelet, namespace: str
) -> None:
    job.create(suspend=True)
    job.wait_for(ConditionType.SUSPENDED)
    holds_for(1.0, lambda: not job.pods, "no pods of a suspended job")
    job.change(suspend=False)
    job.run(step=4)
    assert job.condition(ConditionType.SUSPENDED)["status"] == "False"
    kubelet.leave(namespace)
    job.change(suspend=True)
    eventually(lambda: "deletionTimestamp" in job.controller_pod()["metadata"], "the controller to be stopped")
    holds_for(1.0, lambda: "deletionTimestamp" not in job.policy_pod()["metadata"], "workers until the step commits")
    kubelet.follow(namespace)
    job.wait_for_pods(0)
    job.wait_for(ConditionType.SUSPENDED)
    job.change(suspend=False)
    wait_for_attempt(job, 2)
    assert job.status.get("restarts", 0) == 0


def test_a_failed_job_disturbs_no_other_and_resumes_after_an_edit(
    job: WatchedJob, new_job: NewJob, kubectl: Kubectl, namespace: str
) -> None:
    other = new_job(namespace, "other").create()
    job.create()
    for each in (job, other):
        each.run(step=0)
    job.end_controller(ExitCode.BAD_INPUT, step=0)
    failed = job.wait_for(ConditionType.FAILED, reason=ConditionReason.BAD_INPUT)
    assert ExitCode.BAD_INPUT.meaning in failed["message"]
    assert len(job.attempts) == 1
    other.complete()
    for type_ in ("Failed", "Stalled", "Ready=False"):
        kubectl("wait", "rljob/job", f"--for=condition={type_}", "--timeout=240s")
    job.change(retry=1)
    wait_for_attempt(job, 2)
    for type_ in ("Ready", "Stalled=False", "Failed=False"):
        kubectl("wait", "rljob/job", f"--for=condition={type_}", "--timeout=240s")
    job.complete(attempt=2)


def test_objects_that_running_pods_need_are_created_again(job: WatchedJob, api: ResourceClient, namespace: str) -> None:
    job.create().run(step=2)
    names = {
        "services": CONTROLLER_SERVICE,
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


# --- deletion ---


def test_a_job_is_deleted_at_any_moment_of_its_life(new_job: NewJob, kubelet: SimulatedKubelet) -> None:
    just_made, without_place, suspended, complete = (new_job() for _ in range(4))
    without_place.create().wait_for_pods(2)
    suspended.create(suspend=True).wait_for(ConditionType.SUSPENDED)
    complete.create().run()
    complete.complete()
    just_made.create()
    for job in (just_made, without_place, suspended, complete):
        job.delete()
        job.wait_gone()
    eventually(lambda: not kubelet.pods(complete.namespace), "no pods left")


def test_a_running_job_commits_its_step_before_it_goes(
    job: WatchedJob, kubelet: SimulatedKubelet, namespace: str, control_plane: ControlPlane, operator: OperatorProcess
) -> None:
    """Also if the API server is away in between."""
    job.create().run()
    kubelet.leave(namespace)
    job.delete()
    eventually(lambda: "deletionTimestamp" in job.controller_pod()["metadata"], "the controller to be stopped")
    holds_for(1.0, lambda: "deletionTimestamp" not in job.policy_pod()["metadata"], "workers until the step commits")
    assert labels.FINALIZER in job.object["metadata"]["finalizers"]
    control_plane.kill_api_server()
    try:
        holds_for(2.0, lambda: not operator.crashed, "the operator to wait")
    finally:
        control_plane.start_api_server()
    kubelet.follow(namespace)
    job.wait_gone()


def test_a_job_deleted_in_the_foreground_leaves_its_pods_their_time(
    job: WatchedJob, kubelet: SimulatedKubelet, namespace: str, kubectl: Kubectl
) -> None:
    """The garbage collector deletes all pods at once. Working ranks and engines wait for the controller themselves."""
    job.create().run()
    kubelet.leave(namespace)
    kubectl("delete", "rljob", "job", "--cascade=foreground", "--wait=false")
    eventually(lambda: all("deletionTimestamp" in pod["metadata"] for pod in job.pods.values()), "all to be stopped")

    def keep_their_time() -> bool:
        return [pod["metadata"].get("deletionGracePeriodSeconds") for pod in job.pods.values()] == [5, 5]

    holds_for(2.0, keep_their_time, "the grace period of the template")
    assert labels.FINALIZER in job.object["metadata"]["finalizers"]
    kubelet.follow(namespace)
    job.wait_gone()
    eventually(lambda: not kubelet.pods(namespace), "no pods left")


def test_a_job_deleted_while_the_operator_is_away_goes_when_it_is_back(
    job: WatchedJob, operator: OperatorProcess, api: ResourceClient
) -> None:
    job.create().run()
    operator.kill()
    job.delete()
    holds_for(0.5, lambda: "deletionTimestamp" in job.object["metadata"], "the finalizer to hold")
    forget_leader(api)
    operator.start()
    job.wait_gone()


def test_nothing_is_made_in_a_namespace_that_is_being_deleted(
    job: WatchedJob, api: ResourceClient, namespace: str
) -> None:
    job.create().run()
    api.delete("namespaces", namespace)
    eventually(lambda: api.find("namespaces", namespace) is None, "the namespace to be gone")
