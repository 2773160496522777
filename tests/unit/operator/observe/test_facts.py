"""Facts that are read from stored objects: pods, nodes, jobs and StepReports."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic_core import ErrorDetails

from rljob_api.api_model import MAX_INTEGER
from rljob_api.manifest.problems import ProblemText
from rljob_api.termination_message import TerminationMessage
from rljob_memory.hardware import GPU_TYPES
from rljob_operator.kube.decoding import NESTED_TOO_DEEPLY
from rljob_operator.labels import FINALIZER, GPU_MEMORY_MIB, GPU_PRODUCTS
from rljob_operator.metrics import STEP_REPORTS_REFUSED
from rljob_operator.observe.job_facts import (
    MAX_STEP_REPORT_BYTES,
    job_fact,
    parse_job,
    parse_step_report,
    raw_status,
    step_report_fact,
)
from rljob_operator.observe.node_facts import observed_node
from rljob_operator.observe.observer import Observer
from rljob_operator.observe.pod_facts import observed_pod, pod_fact
from rljob_operator.reconcile.observed import ContainerTermination, ObservedNode, ObservedPod
from tests.unit.operator.observe.objects import UID, Object, job, node, pod, step_report

# --- pods ---

FRESH = ObservedPod(
    name="sums-controller",
    uid="uid-of-sums-controller",
    role="controller",
    index=0,
    attempt=1,
    phase="Pending",
    created_at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
)
AT_FOUR = datetime(2026, 1, 2, 4, tzinfo=UTC)
RUNNING = {"running": {"startedAt": "2026-01-02T03:05:00Z"}}
BAD_INPUT = TerminationMessage(exit_code=84, message="the task has no such reward")
NO_ROOM = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
FULL_VOLUME = 'Usage of EmptyDir volume "tmp" exceeds the limit "1Gi".'


def ours(state: Object, **more: Any) -> Object:
    return {"containerStatuses": [{"name": "rljob", "state": state, **more}]}


def init(state: Object, **more: Any) -> Object:
    return {"initContainerStatuses": [{"name": "fetch", "state": state, **more}]}


def ended(code: int, reason: str = "Error", **more: str) -> Object:
    return {"terminated": {"exitCode": code, "reason": reason, **more}}


def condition(type_: str, status: str, **more: Any) -> Object:
    return {"conditions": [{"type": type_, "status": status, **more}]}


def waiting(reason: str, **more: str) -> Object:
    return {"waiting": {"reason": reason, **more}}


def end(*arguments: Any) -> Object:
    return {"started": True, "end": ContainerTermination(*arguments)}


STARTED = {"started": True}
GATED = condition("Ready", "False", reason="ReadinessGatesNotReady")
CRASHED = ended(1, message="no such bucket")
PULL_ERROR = waiting("ErrImagePull", message="no such image")
BACK_OFF = waiting("CrashLoopBackOff", message="back-off 5m0s")
STATUSES: list[tuple[Object, Object]] = [
    ({}, {}),
    (ours(RUNNING) | condition("Ready", "True"), STARTED | {"ready": True}),
    # --- placement; virtual kubelets may leave the time out ---
    (condition("PodScheduled", "True", lastTransitionTime="2026-01-02T04:00:00Z"), {"scheduled_at": AT_FOUR}),
    (condition("PodScheduled", "True", lastTransitionTime=None), {}),
    (condition("PodScheduled", "False", reason="Unschedulable", message=NO_ROOM), {"unschedulable": NO_ROOM}),
    (condition("PodScheduled", "False", reason="SchedulingGated", message="gated"), {}),
    # --- the end of the trainer ---
    (
        ours(ended(84, finishedAt="2026-01-02T04:00:00Z", message=BAD_INPUT.to_json().decode())),
        end(84, "Error", AT_FOUR, BAD_INPUT),
    ),
    (ours(ended(137, "OOMKilled", message="x" * 5000)), end(137, "OOMKilled", None, None, "x" * 1024)),
    (ours(RUNNING, lastState=ended(1), restartCount=1), STARTED | {"restart_count": 1}),
    # --- reasons why a container does not start ---
    (ours(PULL_ERROR), {"waiting": "ErrImagePull: no such image"}),
    (ours(waiting("ContainerCreating")), {}),
    (ours(waiting("PodInitializing")), {}),
    (ours(PULL_ERROR) | init(waiting("CrashLoopBackOff")), {"waiting": "CrashLoopBackOff: init container fetch"}),
    (
        init(BACK_OFF, lastState=CRASHED),
        {"waiting": "CrashLoopBackOff: init container fetch exited with code 1: no such bucket: back-off 5m0s"},
    ),
    # --- readiness is the trainer's: not that of sidecars and gates, but that of its node ---
    (ours(RUNNING, ready=True) | GATED, STARTED | {"ready": True}),
    (ours(RUNNING, ready=False) | GATED, STARTED),
    (ours(RUNNING, ready=True) | condition("Ready", "False"), STARTED),
    # --- disruptions by the cluster, and evictions that are the pod's own fault ---
    (condition("DisruptionTarget", "True", reason="Preempted"), {"disruption": "Preempted"}),
    (condition("DisruptionTarget", "False", reason="Preempted"), {}),
    ({"reason": "NodeLost", **ours(ended(1))}, end(1, "Error", None, None) | {"disruption": "NodeLost"}),
    ({"phase": "Failed", "reason": "Unexpected"}, {"phase": "Failed", "disruption": "Unexpected"}),
    ({"reason": "Error", **ours(ended(1))}, end(1, "Error", None, None)),
    (
        {"phase": "Failed", "reason": "Evicted", "message": f"{FULL_VOLUME} "},
        {"phase": "Failed", "evicted": FULL_VOLUME},
    ),
    (
        {"reason": "Evicted", "message": "low on memory"} | condition("DisruptionTarget", "True", reason="Kubelet"),
        {"disruption": "Kubelet"},
    ),
    ({"phase": "Failed"} | init(ended(137, "ContainerStatusUnknown")), {"phase": "Failed"}),
]


def trainer(**fields: Any) -> Object:
    return {"containers": [{"name": "rljob", **fields}]}


SMALL_DISK = {"volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "4Gi"}}]}
SPECS: list[tuple[Object, Object]] = [
    ({"nodeName": "gpu-node"}, {"node": "gpu-node"}),
    ({"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}, {"gated": True}),
    (SMALL_DISK, {"shared_memory_bytes": 4 << 30}),
    (trainer(resources={"limits": {"memory": "1536Mi"}}), {"memory_limit_bytes": 3 << 29}),
    (trainer(resources={"requests": {"memory": "1Gi"}}), {"memory_request_bytes": 1 << 30}),
    ({"containers": [{"name": "sidecar", "resources": {"limits": {"memory": "1Gi"}}}]}, {}),
    (trainer(resources={}) | {"volumes": [{"name": "shm", "hostPath": {}}]}, {}),
    (trainer(resources={"limits": {"memory": "1500m"}}), {}),
    (trainer(restartPolicyRules=[{"action": "RestartAllContainers"}]), {"restarts_in_place": True}),
]


def read(**fields: Any) -> ObservedPod:
    found = observed_pod(pod(**fields))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("fields", "facts"),
    [
        *(({"status": status}, facts) for status, facts in STATUSES),
        *(({"spec": spec}, facts) for spec, facts in SPECS),
        ({"annotations": {"rljob.dev/spec-digest": "abc"}}, {"spec_digest": "abc"}),
        (
            {"deletionTimestamp": "2026-01-02T04:00:00Z", "deletionGracePeriodSeconds": 30},
            {"deleting": True, "deletion_grace_seconds": 30, "deletion_due_at": AT_FOUR},
        ),
    ],
)
def test_what_is_read_from_a_pod(fields: Object, facts: Object) -> None:
    """`facts`: those that a fresh pod does not have."""
    assert read(**fields) == replace(FRESH, **facts)


@pytest.mark.parametrize(
    ("own", "phase", "code", "failed"),
    [
        ({}, "Pending", 1, True),  # a sidecar container delays the phase
        ({"restartPolicy": "OnFailure"}, "Pending", 1, False),
        ({"restartPolicyRules": [{"action": "Restart"}], "restartPolicy": "Never"}, "Pending", 1, False),
        ({"restartPolicy": "OnFailure"}, "Failed", 1, True),
        ({"restartPolicy": "Always"}, "Succeeded", 143, False),  # a sidecar is stopped with its pod
    ],
)
def test_an_init_container_has_failed_if_nothing_restarts_it(own: Object, phase: str, code: int, failed: bool) -> None:
    statuses = [{"name": "first", "state": ended(0)}, {"name": "fetch", "state": ended(code, message="boom")}]
    found = read(
        spec={"initContainers": [{"name": "fetch", **own}]}, status={"phase": phase, "initContainerStatuses": statuses}
    )
    message = f"init container fetch of pod p exited with code {code}: boom"
    failure = found.failed_init_container
    assert (failure and failure.message("init container", "p")) == (message if failed else None)


@pytest.mark.parametrize("code", [0, 1])
def test_a_sidecar_that_ends_first_does_not_end_the_trainer(code: int) -> None:
    logger = {"name": "logger", "state": ended(code)}
    containers = {"containerStatuses": [logger, {"name": "rljob", "state": RUNNING, "ready": True}]}
    found = read(status=containers | condition("Ready", "False", reason="ContainersNotReady"))
    assert (found.ended, found.ready, found.failed_sidecar is None) == (False, True, code == 0)


def test_a_trainer_has_ended_though_sidecars_run() -> None:
    status = {
        "phase": "Running",
        "initContainerStatuses": [{"name": "native", "state": RUNNING}],
        "containerStatuses": [{"name": "rljob", "state": ended(0)}, {"name": "istio-proxy", "state": RUNNING}],
        "ephemeralContainerStatuses": [{"name": "debugger", "state": RUNNING}],
    }
    found = read(spec={"initContainers": [{"name": "native", "restartPolicy": "Always"}]}, status=status)
    assert (found.ended, found.has_terminated) == (True, False)
    assert found.kept_by == "containers native, istio-proxy of pod sums-controller still run"


@pytest.mark.parametrize(
    "marks",
    [
        {},
        {"rljob.dev/role": "spy", "rljob.dev/index": "0", "rljob.dev/attempt": "1"},
        {"rljob.dev/role": "policy", "rljob.dev/index": "first", "rljob.dev/attempt": "1"},
        {"rljob.dev/role": "policy", "rljob.dev/index": "0"},
    ],
)
def test_a_pod_without_proper_labels_is_of_no_job(marks: dict[str, str]) -> None:
    assert observed_pod(pod(labels=marks)) is None


def test_the_owner_is_the_one_that_controls_it() -> None:
    other = {"kind": "RLJob", "name": "x", "uid": "other"}
    own = {"kind": "RLJob", "name": "sums", "uid": UID, "controller": True}
    assert pod_fact(pod(ownerReferences=[other, own])).owner_uid == UID
    assert pod_fact(pod(ownerReferences=[other])).owner_uid is None


# --- nodes ---


def ready(status: str) -> Object:
    return {"conditions": [{"type": "Ready", "status": status, "lastTransitionTime": "2026-01-02T04:00:00+00:00"}]}


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        (node(gpus="8"), {"gpus": 8}),
        (node(gpus="0"), {}),
        (node(gpus="1k"), {"gpus": 1000}),
        (node(gpus="1e3"), {"gpus": 1000}),
        (node(status={"allocatable": {"nvidia.com/gpu": "4", "amd.com/gpu": "2"}}), {"gpus": 6, "usable": False}),
        (
            node(status={"declaredFeatures": ["RestartAllContainersOnContainerExits"]}),
            {"usable": False, "restarts_in_place": True},
        ),
        (node(status=ready("Unknown")), {"usable": False, "unreachable_since": AT_FOUR}),
        (node(status=ready("False")), {"usable": False}),
        (node(spec={"taints": [{"key": "a", "effect": "NoSchedule"}]}), {"tainted": True}),
        (node(status={"allocatable": {"memory": "2097151Ki"}}), {"usable": False, "host_memory_bytes": 1 << 30}),
        (
            node(labels={GPU_PRODUCTS[0]: "NVIDIA-A100-SXM4-40GB", GPU_MEMORY_MIB: "40960"}),
            {"gpu": "a100-40", "gpu_memory_bytes": GPU_TYPES["a100-40"].memory_bytes},
        ),
        (
            node(labels={GPU_PRODUCTS[0]: "NVIDIA-H100-80GB-HBM3-MIG-3g.40gb", GPU_MEMORY_MIB: "40448"}),
            {"gpu": "NVIDIA-H100-80GB-HBM3-MIG-3g.40gb", "gpu_memory_bytes": 40448 << 20},
        ),
        (node(labels={GPU_PRODUCTS[0]: "", GPU_MEMORY_MIB: "many"}), {}),
        (node(spec={"taints": [{"key": "a", "effect": "PreferNoSchedule"}]}), {}),
    ],
)
def test_what_is_read_from_a_node(given: Object, facts: Object) -> None:
    marks = tuple(f"{name}={value}" for name, value in sorted(given["metadata"].get("labels", {}).items()))
    expected = replace(ObservedNode("cpu-node", gpus=0, usable=True, labels=marks), **facts)
    assert observed_node(given, ("nvidia.com/gpu", "amd.com/gpu")) == expected


# --- jobs ---


def test_the_job_comes_back_as_it_was_stored_without_managed_fields() -> None:
    fact = job_fact(job(finalizers=["rljob.dev/pods-end-first"], status={"step": 3}, fieldOfALaterVersion={"a": 1}))
    parsed = parse_job(fact.text).job
    assert parsed is not None
    assert parsed.spec.algorithm.steps == 60
    assert parsed.status is not None
    assert parsed.status.step == 3
    assert parsed.metadata.managed_fields == []
    assert FINALIZER in fact.finalizers
    assert raw_status(fact.text) == {"step": 3}
    assert (fact.resource_version, fact.generation, fact.deleting) == ("10", 2, False)


TASK: Object = {"model": {"uri": "random://qwen3"}, "task": {"name": "digits"}}


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (TASK | {"algorithm": {"steps": "many"}}, "spec.algorithm.steps: expected a whole number"),
        ({"policy": {"template": {NESTED_TOO_DEEPLY: True}}}, "levels of nesting"),
    ],
)
def test_a_job_that_cannot_be_read_has_a_problem_and_keeps_its_status(spec: Object, problem: str) -> None:
    parsed = parse_job(job_fact(job(spec=spec, status={"step": 3})).text)
    assert parsed.job is None
    assert problem in (parsed.problem or "")
    assert parsed.status is not None
    assert parsed.status.step == 3


def test_a_status_that_cannot_be_read_counts_as_absent() -> None:
    parsed = parse_job(job_fact(job(status={"step": "some"})).text)
    assert parsed.job is not None
    assert (parsed.job.status, parsed.problem) == (None, None)


def test_only_the_first_errors_of_a_job_are_formatted(monkeypatch: pytest.MonkeyPatch) -> None:
    def put_into_words(_: ProblemText, error: ErrorDetails) -> str:
        worded.append(error)
        return "wrong"

    worded: list[ErrorDetails] = []
    monkeypatch.setattr(ProblemText, "of", put_into_words)
    stored = job(spec={"task": {"name": "digits", "args": {f"a{number}": 1 for number in range(1_000)}}})
    problem = parse_job(job_fact(stored).text).problem
    assert problem is not None
    assert len(worded) == problem.count("wrong") == 20


# --- StepReports: the job's own content, within bounds ---


@pytest.mark.parametrize(
    ("spec", "delegated"),
    [
        ({}, False),
        ({"managedBy": "rljob.dev/operator"}, False),
        ({"managedBy": "kueue.x-k8s.io/multikueue"}, True),
        ({"managedBy": "kueue.x-k8s.io/multikueue", "algorithm": "cannot be parsed"}, True),
        ({"managedBy": ["a"]}, False),
        (None, False),
    ],
)
def test_a_job_of_another_manager_waits_for_no_node_and_holds_none(spec: object, delegated: bool) -> None:
    fact = job_fact(job() | {"spec": spec})
    assert (fact.delegated, fact.placed) == (delegated, delegated)
    running = job_fact(job(status={"display": {"phase": "Running"}}) | {"spec": spec})
    assert running.runs == (not delegated)


def test_the_content_is_read_or_its_first_error_is_reported() -> None:
    report, problem = step_report_fact(step_report(step=4)).content(UID)
    assert report is not None
    assert (report.step, problem) == (4, None)
    report, problem = step_report_fact(step_report(step="four", memory=[{}] * 9)).content(UID)
    assert report is None
    assert problem is not None
    assert problem.startswith("step: ")
    assert len(problem) <= 1024


def test_a_report_of_another_job_is_not_believed_and_wakes_no_job() -> None:
    made_by_hand = step_report(step=4)
    del made_by_hand["metadata"]["ownerReferences"]
    for foreign in (made_by_hand, step_report(owner="uid of a deleted job", step=4)):
        assert step_report_fact(foreign).content(UID) == (None, None)
    woken: list[tuple[str, str]] = []
    observer = Observer(("nvidia.com/gpu",), woken.append)
    observer.step_reports.put(step_report(version=39, step=1))
    observer.jobs.put(job())
    woken.clear()
    observer.step_reports.put(step_report(version=40, owner="another", step=2))
    assert woken == [("research", "sums")], "the job's own report was replaced"
    observer.step_reports.put(step_report(version=41, owner="another", step=3))
    assert len(woken) == 1


def test_a_report_that_is_too_large_is_not_read() -> None:
    before = STEP_REPORTS_REFUSED._value.get()
    fact = step_report_fact(step_report(lastEvidence={"message": "x" * MAX_STEP_REPORT_BYTES}))
    assert fact.packed_text == b""
    report, problem = fact.content(UID)
    assert report is None
    assert "256 KiB" in (problem or "")
    assert STEP_REPORTS_REFUSED._value.get() == before + 1


def test_content_beyond_the_bounds_is_brought_within_them() -> None:
    numbers = {"limit_bytes": -(2**70), "n" * 65: 1} | {f"n{index}": index for index in range(40)}
    diagnosis = {"class": "c" * 99, "confidence": 7, "message": "m" * 3000, "numbers": numbers}
    content = {
        "step": -5,
        "attempt": 1,
        "later": {"field": 1},
        "seconds": {"rollout": 1e300},
        "memory": [{"role": "policy", "rank": 0, "peakRssBytes": 2**63}] * 300,
        "memoryPressure": {"diagnosis": diagnosis, "role": "policy", "stepsLeft": 2**80},
    }
    report, problem = parse_step_report(json.dumps(content).encode())
    assert problem is None
    assert report is not None
    assert report.memory_pressure is not None
    assert report.seconds is not None
    assert (report.step, report.seconds.rollout, len(report.memory)) == (0, 1e9, 256)
    assert report.memory[0].peak_rss_bytes == report.memory_pressure.steps_left == MAX_INTEGER
    found = report.memory_pressure.diagnosis
    assert (len(found.class_name), found.confidence, len(found.message), len(found.numbers)) == (64, 1, 2048, 32)
    assert found.numbers["limit_bytes"] == -MAX_INTEGER
    assert "n" * 65 not in found.numbers
