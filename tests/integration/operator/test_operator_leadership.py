"""Of two replicas one acts; the other takes over when it is gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rljob_testing.operator.api_client import ApiClient
from rljob_testing.operator.eventually import eventually, holds_for
from rljob_testing.operator.fault_proxy import FaultProxy
from rljob_testing.operator.operator_process import OperatorProcess
from rljob_testing.operator.restarts import OPERATOR_NAMESPACE, kept_running
from rljob_testing.operator.watched_job import WatchedJob
from tests.integration.operator.conftest import SETTINGS


@pytest.fixture
def standby(
    operator: OperatorProcess, operator_kubeconfig: Path, api: ApiClient, ports: Iterator[int]
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


def lease_of(api: ApiClient) -> dict[str, Any]:
    [lease] = api.list("leases", OPERATOR_NAMESPACE)
    return dict(lease["spec"])


def holder(api: ApiClient) -> str:
    return str(lease_of(api).get("holderIdentity") or "")


def test_the_second_replica_waits_and_takes_over_from_a_killed_leader(
    job: WatchedJob, operator: OperatorProcess, standby: OperatorProcess, api: ApiClient, proxy: FaultProxy
) -> None:
    leader = holder(api)
    job.create().run(step=2)
    assert standby.probe("readyz") == 200
    assert holder(api) == leader
    operator.kill()
    job.report(6)
    assert job.status.get("step") != 6 or holder(api) != leader, "nobody leads yet"
    eventually(lambda: holder(api) not in ("", leader), "the other replica to lead")
    eventually(lambda: job.status.get("step") == 6, "the new leader's work")
    assert len(job.attempts) == 1
    job.complete()


def test_a_leader_that_is_stopped_hands_over_at_once(
    job: WatchedJob, operator: OperatorProcess, standby: OperatorProcess, api: ApiClient
) -> None:
    leader = holder(api)
    assert operator.stop() == 0, operator.end_of_log()
    assert holder(api) != leader, f"released, not left to expire; {operator.end_of_log()}"
    eventually(lambda: holder(api) not in ("", leader), "the other replica to lead")
    job.create().run()


def test_a_leader_that_is_stopped_during_a_renewal_hands_over_too(
    job: WatchedJob, operator: OperatorProcess, standby: OperatorProcess, api: ApiClient, proxy: FaultProxy
) -> None:
    leader = holder(api)
    with proxy.failing(None, verbs=("update",), resources=("leases",), times=1, after_passing=True) as fault:
        before = lease_of(api)
        eventually(lambda: fault.hits and lease_of(api) != before, "a renewal without a response")
        assert operator.stop() == 0, operator.end_of_log()
    assert holder(api) != leader, f"released, not left to expire; {operator.end_of_log()}"
    eventually(lambda: holder(api) not in ("", leader), "the other replica to lead")


def test_a_leader_that_cannot_renew_its_lease_ends_before_another_acts(
    job: WatchedJob, operator: OperatorProcess, proxy: FaultProxy
) -> None:
    with proxy.failing(500, resources=("leases",)):
        assert operator.wait_ended() != 0
        job.create()
        holds_for(0.5, lambda: not job.pods, "no pods without a leader")


def test_both_replicas_together_write_what_one_would(
    job: WatchedJob, operator: OperatorProcess, standby: OperatorProcess, proxy: FaultProxy, namespace: str
) -> None:
    job.create().run(step=0)
    proxy.wait_until_quiet()
    counts = proxy.counts(namespace)
    assert (counts["patch rljobs"], counts["create pods"]) == (1, 2), counts
    assert counts["patch rljobs/status"] <= 6, counts
