"""A job can be deleted at any moment, also while the operator or the API server is away."""

from __future__ import annotations

from rljob_api.conditions import ConditionType
from rljob_cluster.control_plane import ControlPlane
from rljob_operator.labels import FINALIZER
from rljob_testing.operator.api_client import ApiClient
from rljob_testing.operator.eventually import eventually, holds_for
from rljob_testing.operator.operator_process import OperatorProcess
from rljob_testing.operator.restarts import forget_leader
from rljob_testing.operator.simulated_kubelet import SimulatedKubelet
from rljob_testing.operator.watched_job import WatchedJob
from tests.integration.operator.conftest import Kubectl


def test_a_running_job_commits_its_step_before_it_goes(
    job: WatchedJob, kubelet: SimulatedKubelet, namespace: str
) -> None:
    job.create().run()
    kubelet.leave(namespace)
    job.delete()
    eventually(lambda: "deletionTimestamp" in job.controller_pod()["metadata"], "the controller to be stopped")
    holds_for(1.0, lambda: "deletionTimestamp" not in job.policy_pod()["metadata"], "workers until the step commits")
    assert FINALIZER in job.object["metadata"]["finalizers"]
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
    assert FINALIZER in job.object["metadata"]["finalizers"]
    kubelet.follow(namespace)
    job.wait_gone()
    eventually(lambda: not kubelet.pods(namespace), "no pods left")


def test_a_job_whose_pods_are_not_placed_goes(job: WatchedJob) -> None:
    job.create()
    job.wait_for_pods(2)
    job.delete()
    job.wait_gone()


def test_a_job_goes_that_was_deleted_as_soon_as_it_was_made(job: WatchedJob) -> None:
    job.create().delete()
    job.wait_gone()


def test_a_suspended_job_goes(job: WatchedJob) -> None:
    job.create(suspend=True)
    job.wait_for(ConditionType.SUSPENDED)
    job.delete()
    job.wait_gone()


def test_a_complete_job_goes_with_its_last_pod(job: WatchedJob, kubelet: SimulatedKubelet, namespace: str) -> None:
    job.create().run()
    job.complete()
    job.delete()
    job.wait_gone()
    eventually(lambda: not kubelet.pods(namespace), "no pods left")


def test_a_job_deleted_while_the_operator_is_away_goes_when_it_is_back(
    job: WatchedJob, operator: OperatorProcess, api: ApiClient
) -> None:
    job.create().run()
    operator.kill()
    job.delete()
    holds_for(0.5, lambda: "deletionTimestamp" in job.object["metadata"], "the finalizer to hold")
    forget_leader(api)
    operator.start()
    job.wait_gone()


def test_a_job_goes_though_the_api_server_was_away_in_between(
    job: WatchedJob,
    kubelet: SimulatedKubelet,
    namespace: str,
    control_plane: ControlPlane,
    operator: OperatorProcess,
    api: ApiClient,
) -> None:
    job.create().run()
    kubelet.leave(namespace)
    job.delete()
    eventually(lambda: "deletionTimestamp" in job.controller_pod()["metadata"], "the controller to be stopped")
    control_plane.kill_api_server()
    try:
        holds_for(2.0, lambda: not operator.crashed, "the operator to wait")
    finally:
        control_plane.start_api_server()
    kubelet.follow(namespace)
    job.wait_gone()


def test_nothing_is_made_in_a_namespace_that_is_being_deleted(job: WatchedJob, api: ApiClient, namespace: str) -> None:
    job.create().run()
    api.delete("namespaces", namespace)
    eventually(lambda: api.find("namespaces", namespace) is None, "the namespace to be gone")
