"""Memory runs out, and the job resumes with a changed plan: in larger pods, or restarted in the same ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rljob_api.conditions import ConditionType
from rljob_api.exit_codes import ExitCode
from rljob_operator.observe.node_facts import RESTARTS_IN_PLACE
from rljob_testing.operator import manifests
from rljob_testing.operator.api_client import ResourceClient, refusal
from rljob_testing.operator.fault_proxy import FaultProxy
from rljob_testing.operator.operator_process import (
    KILLED_EFFECT_SECONDS,
    OperatorProcess,
    killed_after_each_change,
    outcome,
)
from rljob_testing.operator.simulated_kubelet import SimulatedKubelet
from rljob_testing.operator.watched_job import WatchedJob
from rljob_testing.patience import eventually
from tests.integration.operator.conftest import NewJob

Fail = Callable[[WatchedJob], None]

PATIENT = {"gang": "Disabled"}
"""Pods of which the operator dies before it has made them all are not released, however slowly it comes back."""

SPEC: dict[str, Any] = {
    "policy": {"template": {"spec": {"containers": [{"resources": {"limits": {"memory": "8Gi"}}}]}}},
    "recovery": {"maxHostMemory": "10Gi"},
    **PATIENT,
}
PLAN = manifests.PLAN | {"rolloutSleep": "Level2"}
"""Nothing is left in it that would take less host memory."""
EVIDENCE: dict[str, Any] = {
    "time": "2026-01-01T00:00:00Z",
    "attempt": 1,
    "role": "controller",
    "rank": 0,
    "step": 5,
    "message": "a context of the controller's on the GPU",
    "diagnoses": [{"class": "ControllerContext", "confidence": 0.9, "message": "4 contexts hold 2.00 GiB"}],
}


@pytest.fixture
def restarting_nodes(kubelet: SimulatedKubelet) -> Iterator[None]:
    kubelet.declare(RESTARTS_IN_PLACE)
    yield
    kubelet.declare()


def kill_worker(job: WatchedJob) -> None:
    """The kernel kills a worker for its memory; the job resumes in new pods."""
    job.kubelet.end(job.policy_pod(), 137, reason="OOMKilled")


def restart_in_place(job: WatchedJob) -> None:
    """The controller cannot continue, and waits; both pods restart once there is a new attempt for them."""
    pending = {"exitCode": ExitCode.DEVICE_OUT_OF_MEMORY, "message": "a GPU ran out of memory"}
    number = job.attempt
    job.report(4, number, lastEvidence=EVIDENCE | {"attempt": number}, pendingExit=pending)
    decision = {"attempt": number, "nextAttempt": number + 1, "planGeneration": 2}
    eventually(
        lambda: job.step_report.get("decision") == decision, "a decision", KILLED_EFFECT_SECONDS, lambda: job.status
    )
    assert job.attempts[-1]["podsOfAttempt"] == number
    for pod in job.pods.values():
        job.kubelet.restart(pod)


def live_through(job: WatchedJob, fail: Fail) -> None:
    job.kubelet.follow(job.namespace)
    job.wait_for(ConditionType.RUNNING, timeout=KILLED_EFFECT_SECONDS)
    first = job.attempt
    job.report(4, first, plan=PLAN)
    eventually(
        lambda: job.status.get("step") == 4 and job.status.get("plan"),
        "the report in the status",
        KILLED_EFFECT_SECONDS,
    )
    fail(job)
    eventually(lambda: job.attempt > first, "another attempt", KILLED_EFFECT_SECONDS, lambda: job.status)
    job.wait_for(ConditionType.RUNNING, timeout=KILLED_EFFECT_SECONDS)
    if fail is kill_worker:
        eventually(lambda: "10Gi" in memory_limits(job), "the raised limit", context=lambda: memory_limits(job))
    job.report(10, job.attempt)
    job.end_controller(0)
    job.wait_for(ConditionType.COMPLETE, timeout=KILLED_EFFECT_SECONDS)
    job.wait_for_pods(1, KILLED_EFFECT_SECONDS)


def memory_limits(job: WatchedJob) -> list[str]:
    resources = [pod["spec"]["containers"][0].get("resources", {}) for pod in job.pods.values()]
    return [str(each.get("limits", {}).get("memory")) for each in resources]


def what_was_changed(job: WatchedJob) -> list[tuple[str, str, str]]:
    changes = job.status["planChanges"]
    return [(c["remedy"]["setting"], c["remedy"]["after"], c["level"]) for c in changes]


def test_a_host_memory_remedy_survives_kills_of_the_operator(
    job: WatchedJob, new_job: NewJob, operator: OperatorProcess, proxy: FaultProxy, api: ResourceClient
) -> None:
    undisturbed = new_job().create(**SPEC)  # in one namespace, the second job would start with its plan
    live_through(undisturbed, kill_worker)
    assert what_was_changed(undisturbed) == [("hostMemory", "10Gi", "ReplacePods")]
    assert (undisturbed.status["adjustments"], undisturbed.status.get("restarts", 0)) == (1, 0)
    eventually(lambda: "JobCompleted" in undisturbed.event_reasons(), "the last Event")
    reasons = undisturbed.event_reasons()
    assert reasons.index("OutOfMemory") <= reasons.index("PlanChanged") < reasons.index("Recovered")
    proxy.wait_until_quiet()
    with killed_after_each_change(operator, proxy, api) as kills:
        live_through(job.create(**SPEC), kill_worker)
        ended = outcome(job), what_was_changed(job)
        job.delete()
        job.wait_gone(KILLED_EFFECT_SECONDS)
    assert ended == (outcome(undisturbed), what_was_changed(undisturbed))
    assert len(kills) >= 15


@pytest.mark.usefixtures("restarting_nodes")
def test_pods_are_restarted_in_place_wherever_the_operator_is_killed(
    job: WatchedJob, operator: OperatorProcess, proxy: FaultProxy, api: ResourceClient
) -> None:
    with killed_after_each_change(operator, proxy, api) as kills:
        job.create(**PATIENT)
        job.kubelet.follow(job.namespace)
        job.wait_for(ConditionType.RUNNING, timeout=KILLED_EFFECT_SECONDS)
        before = {name: pod["metadata"]["uid"] for name, pod in job.pods.items()}
        live_through(job, restart_in_place)
    assert what_was_changed(job) == [("processes", "fresh", "RestartInPlace")]
    *_, failed, last = job.attempts
    assert (failed["reason"], last["podsOfAttempt"]) == ("DeviceOutOfMemory", failed["number"])
    (controller,) = job.pods.values()
    assert before[controller["metadata"]["name"]] == controller["metadata"]["uid"]
    config_map = api.get("configmaps", "job-rljob", job.namespace)
    assert json.loads(config_map["data"]["attempt.json"])["attempt"] == last["number"]
    assert len(kills) >= 12


def test_a_decision_never_reaches_a_report_that_has_replaced_another(
    job: WatchedJob, api: ResourceClient, namespace: str, operator: OperatorProcess
) -> None:
    """The writes that the operator would make to either."""
    job.create().run()
    operator.kill()
    report = api.get("stepreports", "job", namespace)
    content = {"status": {"decision": {"attempt": 1}}}
    patch = {"metadata": {"resourceVersion": report["metadata"]["resourceVersion"]}, **content}
    api.delete("stepreports", "job", namespace)
    replaced = {key: value for key, value in report["metadata"].items() if key in ("name", "namespace")}
    api.create("stepreports", {**report, "metadata": replaced}, namespace)
    refused = refusal(api.merge, "stepreports", "job", patch, namespace, "status")
    assert refused is not None
    assert refused.status == 409


def test_running_pods_get_a_larger_limit_before_the_kernel_kills(job: WatchedJob, operator: OperatorProcess) -> None:
    job.create(**SPEC).run()
    pod = job.policy_pod()
    diagnosis = {"class": "HostMemory", "confidence": 0.95, "message": "it grows", "numbers": {"limit_bytes": 8 << 30}}
    job.report(4, 1, plan=PLAN, memoryPressure={"diagnosis": diagnosis, "role": "policy", "rank": 0, "stepsLeft": 0})
    eventually(lambda: "10Gi" in memory_limits(job), "the raised limit", context=lambda: job.status)
    assert job.policy_pod()["metadata"]["uid"] == pod["metadata"]["uid"]
    assert job.status["plan"]["hostMemory"] == 10 << 30
    assert (job.attempt, job.status.get("planChanges", [])) == (1, [])
    eventually(lambda: "PlanChanged" in job.event_reasons(), "an Event")
    assert "PodNotResized" not in job.event_reasons()


def test_a_pod_that_has_replaced_another_is_not_resized(job: WatchedJob, api: ResourceClient, namespace: str) -> None:
    job.create(**SPEC).run()
    name = job.policy_pod()["metadata"]["name"]
    resources = {"limits": {"memory": "9Gi"}}
    patch = {"metadata": {"uid": "another"}, "spec": {"containers": [{"name": "rljob", "resources": resources}]}}
    refused = refusal(api.resize, name, patch, namespace)
    assert refused is not None
    assert refused.status in (409, 422)
    assert "8Gi" in memory_limits(job)
