"""The API server refuses, hangs, and falls silent: jobs come through, and the operator neither dies nor storms."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.conditions import ConditionType
from rljob_cluster.control_plane import ControlPlane
from rljob_testing.operator.api_client import ResourceClient
from rljob_testing.operator.fault_proxy import FaultProxy
from rljob_testing.operator.operator_process import OperatorProcess
from rljob_testing.operator.simulated_kubelet import SimulatedKubelet
from rljob_testing.operator.watched_job import WatchedJob
from rljob_testing.patience import eventually, holds_for


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 429, "times": 6, "retry_after_seconds": 1},
        {"status": 500, "times": 6},
        {"status": 503, "times": 6},
        {"status": 409, "verbs": ("patch", "update"), "resources": ("rljobs/status",), "times": 6},
        {"status": 500, "verbs": ("create", "patch"), "times": 6, "after_passing": True},
        {"status": 500, "verbs": ("create",), "resources": ("events",), "times": None},
    ],
    ids=["too-many-requests", "errors", "unavailable", "conflicts", "answers-lost", "events-refused"],
)
def test_a_job_runs_through_failing_requests(job: WatchedJob, proxy: FaultProxy, fault: dict[str, Any]) -> None:
    with proxy.failing(**fault) as struck:
        job.create()
        job.kubelet.follow(job.namespace)
        job.wait_for(ConditionType.RUNNING)
        eventually(lambda: struck.hits > 0, "a request that fails")
    assert (len(job.pods), len(job.attempts)) == (2, 1)


def test_retry_after_is_waited_for(job: WatchedJob, proxy: FaultProxy, namespace: str) -> None:
    with proxy.failing(
        429, verbs=("create",), resources=("pods",), namespace=namespace, retry_after_seconds=2, times=2
    ) as struck:
        job.create()
        job.wait_for_pods(2)
    asked = [request.time for request in proxy.writes(namespace) if str(request).startswith("create pods")]
    assert struck.hits == 2
    assert max(asked) - min(asked) >= 2.0


def test_an_api_server_that_keeps_failing_is_not_stormed(
    job: WatchedJob, proxy: FaultProxy, operator: OperatorProcess, namespace: str
) -> None:
    with proxy.failing(500, verbs=("create", "patch", "update", "delete")):
        job.create()
        holds_for(3.0, lambda: not operator.crashed, "the operator to live")
        assert len(proxy.writes(namespace)) < 30
    job.wait_for_pods(2)


def test_a_request_without_an_answer_holds_up_no_other_job(
    job: WatchedJob, proxy: FaultProxy, api: ResourceClient, kubelet: SimulatedKubelet, namespace: str
) -> None:
    with proxy.failing(None, verbs=("create",), resources=("pods",), namespace=namespace, times=1):
        job.create()
        eventually(lambda: "create pods" in proxy.counts(namespace), "the request that hangs")
        other = WatchedJob(api, kubelet, namespace, "other").create()
        eventually(lambda: len(other.pods) == 2, "the other job's pods")
    job.wait_for_pods(2)


def test_interrupted_watches_resume_at_their_resource_version(job: WatchedJob, proxy: FaultProxy) -> None:
    job.create().run(step=2)
    lists = sum(count for what, count in proxy.counts().items() if what.startswith("list"))
    assert proxy.cut_watches() >= 3
    job.report(7)
    eventually(lambda: job.status.get("step") == 7, "the report that came while no watch was open")
    again = sum(count for what, count in proxy.counts().items() if what.startswith("list"))
    assert again == lists, "a cut watch resumes at its resourceVersion; a new list is for 410 Gone"
    job.complete()


def test_an_api_server_that_was_away_is_found_again(
    job: WatchedJob, control_plane: ControlPlane, operator: OperatorProcess
) -> None:
    job.create().run(step=1)
    control_plane.kill_api_server()
    try:
        holds_for(3.0, lambda: not operator.crashed, "the operator to wait")
    finally:
        control_plane.start_api_server()
    job.report(8)
    eventually(lambda: job.status.get("step") == 8, "the new step in the status")
    assert len(job.attempts) == 1
    job.complete()
