"""The operator may die at any moment: what it does next depends on the cluster alone."""

from __future__ import annotations

import json

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_operator.runtime.unfinished_reconciles import ANNOTATION
from rljob_testing.operator.api_client import ApiClient
from rljob_testing.operator.eventually import eventually
from rljob_testing.operator.fault_proxy import FaultProxy
from rljob_testing.operator.operator_process import OperatorProcess
from rljob_testing.operator.restarts import (
    KILLED_EFFECT_SECONDS,
    OPERATOR_NAMESPACE,
    forget_leader,
    killed_after_each_change,
    outcome,
    restart,
)
from rljob_testing.operator.simulated_kubelet import SimulatedKubelet
from rljob_testing.operator.watched_job import WatchedJob


def test_a_restarted_operator_adopts_running_jobs_without_a_write(
    job: WatchedJob, operator: OperatorProcess, proxy: FaultProxy, api: ApiClient
) -> None:
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
    job.complete()


def test_what_happened_while_the_operator_was_away_is_seen(
    job: WatchedJob, operator: OperatorProcess, api: ApiClient
) -> None:
    job.create().run()
    operator.kill()
    job.report(10)
    job.end_controller(0)
    forget_leader(api)
    operator.start()
    job.wait_for(ConditionType.COMPLETE)


def test_a_job_over_which_the_process_ended_comes_after_all_others(
    job: WatchedJob, operator: OperatorProcess, kubelet: SimulatedKubelet, api: ApiClient, namespace: str
) -> None:
    operator.stop()
    deadly = WatchedJob(api, kubelet, namespace, "deadly").create()
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


LEASE = "rljob-operator"


def test_killed_after_each_change_it_makes_it_comes_to_the_same_end(
    job: WatchedJob,
    operator: OperatorProcess,
    proxy: FaultProxy,
    api: ApiClient,
    kubelet: SimulatedKubelet,
    namespace: str,
) -> None:
    """A whole life, another attempt included: one change to the cluster, and the process is dead, again and again."""
    undisturbed = WatchedJob(api, kubelet, namespace, "undisturbed").create()
    live_through(undisturbed)
    expected = outcome(undisturbed)
    proxy.wait_until_quiet()
    with killed_after_each_change(operator, proxy, api) as kills:
        live_through(job.create())
        ended = outcome(job)
        job.delete()
        job.wait_gone(KILLED_EFFECT_SECONDS)
    assert ended == expected
    assert len(kills) >= 15


def live_through(job: WatchedJob) -> None:
    """Starts, loses a worker pod, goes on, completes."""
    job.kubelet.follow(job.namespace)
    job.wait_for(ConditionType.RUNNING, timeout=KILLED_EFFECT_SECONDS)
    first = job.attempt
    job.report(4, first)
    eventually(lambda: job.status.get("step") == 4, "the reported step in the status", KILLED_EFFECT_SECONDS)
    job.kubelet.vanish(job.policy_pod())
    eventually(lambda: job.attempt > first, "another attempt", KILLED_EFFECT_SECONDS, lambda: job.status)
    job.wait_for(ConditionType.RUNNING, timeout=KILLED_EFFECT_SECONDS)
    job.report(10, job.attempt)
    job.end_controller(0)
    job.wait_for(ConditionType.COMPLETE, timeout=KILLED_EFFECT_SECONDS)
    job.wait_for_pods(1, KILLED_EFFECT_SECONDS)
