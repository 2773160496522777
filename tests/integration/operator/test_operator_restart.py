"""The operator may die or be replaced at any moment: what it does next depends on the cluster alone."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_cluster.control_plane import ControlPlane
from rljob_operator.runtime.reconcile_loop import ANNOTATION
from rljob_testing.operator.api_client import ResourceClient
from rljob_testing.operator.fault_proxy import FaultProxy
from rljob_testing.operator.operator_process import (
    OPERATOR_NAMESPACE,
    OperatorProcess,
    forget_leader,
    kept_running,
    restart,
)
from rljob_testing.operator.watched_job import WatchedJob
from rljob_testing.patience import eventually, holds_for
from rljob_testing.repository import ROOT
from tests.integration.operator.conftest import SETTINGS, NewJob, run_kubectl

LEASE = "rljob-operator"


def test_a_restarted_operator_adopts_running_jobs_without_a_write(
    job: WatchedJob, operator: OperatorProcess, proxy: FaultProxy, api: ResourceClient
) -> None:
    """And sees what happened while it was away."""
    job.create().run(step=3)
    eventually(lambda: job.status.get("step") == 3, "the step in the status")
    proxy.wait_until_quiet()
    pods = {name: pod["metadata"]["uid"] for name, pod in job.pods.items()}
    version = job.object["metadata"]["resourceVersion"]
    written = len(proxy.writes(job.namespace))
    restart(operator, api)
    proxy.wait_until_quiet(seconds=2.0)
    assert [str(write) for write in proxy.writes(job.namespace)[written:]] == []
    assert {name: pod["metadata"]["uid"] for name, pod in job.pods.items()} == pods
    assert job.object["metadata"]["resourceVersion"] == version

    operator.kill()
    job.report(10)
    job.end_controller(0)
    forget_leader(api)
    operator.start()
    job.wait_for(ConditionType.COMPLETE)


def test_a_job_over_which_the_process_ended_comes_after_all_others(
    job: WatchedJob, operator: OperatorProcess, new_job: NewJob, api: ResourceClient, namespace: str
) -> None:
    operator.stop()
    deadly = new_job(namespace, "deadly").create()
    record = json.dumps({f"{namespace}/deadly": 1})
    api.merge("leases", LEASE, {"metadata": {"annotations": {ANNOTATION: record}}}, OPERATOR_NAMESPACE)
    operator.start()
    job.create().run()
    condition = deadly.wait_for(ConditionType.FAILED, "False", ConditionReason.RECONCILE_ERROR)
    assert "the operator's process ended once while it reconciled this job" in condition["message"]
    assert deadly.pods == {}
    assert api.get("leases", LEASE, OPERATOR_NAMESPACE)["metadata"]["annotations"][ANNOTATION] == record
    deadly.delete()
    deadly.wait_gone()
    job.complete()


# --- two replicas ---


@pytest.fixture
def standby(
    operator: OperatorProcess, operator_kubeconfig: Path, api: ResourceClient, ports: Iterator[int]
) -> Iterator[OperatorProcess]:
    """A second replica, with the same identity at the API server as the first, which leads."""
    operator.wait_ready()  # it leads, even if it has just lost its Lease and been started again
    standby = OperatorProcess(
        operator_kubeconfig, operator_kubeconfig.with_name("standby.log"), next(ports), next(ports), SETTINGS
    )
    standby.start()
    with kept_running(standby, api):
        yield standby
    if standby.running:
        standby.stop()


def lease_of(api: ResourceClient) -> dict[str, Any]:
    [lease] = api.list("leases", OPERATOR_NAMESPACE)
    return dict(lease["spec"])


def holder(api: ResourceClient) -> str:
    return str(lease_of(api).get("holderIdentity") or "")


def test_the_second_replica_waits_and_takes_over_from_a_killed_leader(
    job: WatchedJob,
    operator: OperatorProcess,
    standby: OperatorProcess,
    api: ResourceClient,
    proxy: FaultProxy,
    namespace: str,
) -> None:
    leader = holder(api)
    job.create().run(step=0)
    proxy.wait_until_quiet()
    counts = proxy.counts(namespace)
    assert (counts["patch rljobs"], counts["create pods"]) == (1, 2), "both write what one would"
    assert counts["patch rljobs/status"] <= 6, counts
    assert standby.probe("readyz") == 200
    assert holder(api) == leader
    operator.kill()
    job.report(6)
    assert job.status.get("step") != 6 or holder(api) != leader, "nobody leads yet"
    eventually(lambda: holder(api) not in ("", leader), "the other replica to lead")
    eventually(lambda: job.status.get("step") == 6, "the new leader's work")
    assert len(job.attempts) == 1
    job.complete()


def test_a_leader_that_is_stopped_during_a_renewal_hands_over_at_once(
    job: WatchedJob, operator: OperatorProcess, standby: OperatorProcess, api: ResourceClient, proxy: FaultProxy
) -> None:
    leader = holder(api)
    with proxy.failing(None, verbs=("update",), resources=("leases",), times=1, after_passing=True) as fault:
        before = lease_of(api)
        eventually(lambda: fault.hits and lease_of(api) != before, "a renewal without a response")
        assert operator.stop() == 0, operator.end_of_log()
    assert holder(api) != leader, f"released, not left to expire; {operator.end_of_log()}"
    eventually(lambda: holder(api) not in ("", leader), "the other replica to lead")
    job.create().run()


def test_a_leader_that_cannot_renew_its_lease_ends_before_another_acts(
    job: WatchedJob, operator: OperatorProcess, proxy: FaultProxy
) -> None:
    with proxy.failing(500, resources=("leases",)):
        assert operator.wait_ended() != 0
        job.create()
        holds_for(0.5, lambda: not job.pods, "no pods without a leader")


# --- another version of the CRDs ---

OLDER = ROOT / "tests" / "data" / "crds"
"""Before spec.env and the status subresource of StepReports."""

CURRENT = ROOT / "crds" / "manifests"
NEW_FIELD = {"env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}


@pytest.fixture
def current_crds(control_plane: ControlPlane, api: ResourceClient) -> Iterator[None]:
    """Whatever the test serves, the current CRDs are served after it."""
    yield
    serve(control_plane, api, CURRENT)


def serve(control_plane: ControlPlane, api: ResourceClient, manifests: object) -> None:
    """Apply the CRDs, and wait until the API server validates by them."""
    run_kubectl(control_plane, "apply", "--server-side", "--force-conflicts", "-f", str(manifests))

    def explained() -> subprocess.CompletedProcess[str]:
        return run_kubectl(control_plane, "explain", "rljob.spec.env", check=False)

    eventually(lambda: (explained().returncode == 0) == (manifests == CURRENT), "the CRDs to be served")


def test_jobs_of_both_versions_live_through_upgrade_and_rollback(
    current_crds: None, job: WatchedJob, operator: OperatorProcess, control_plane: ControlPlane, api: ResourceClient
) -> None:
    """Helm changes CRDs and operator together, so no operator runs with CRDs that are older than itself."""
    newer = replace(job, name="newer")
    operator.stop()
    serve(control_plane, api, OLDER)
    job.create()

    serve(control_plane, api, CURRENT)
    operator.start()
    job.run(step=2)
    newer.create(**NEW_FIELD).run(step=3)

    operator.stop()
    serve(control_plane, api, OLDER)
    eventually(lambda: "env" not in newer.object["spec"], "the field to be dropped")
    for other in (job, newer):
        api.merge("rljobs", other.name, {"metadata": {"labels": {"written-by": "older"}}}, job.namespace)

    serve(control_plane, api, CURRENT)
    operator.start()
    for other in (job, newer):
        other.complete()
        assert [attempt["number"] for attempt in other.attempts] == [1]
