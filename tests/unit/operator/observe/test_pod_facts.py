"""Facts read from a pod's metadata, conditions and container states."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from rljob_api.termination_message import TerminationMessage
from rljob_operator.observe.pod_facts import observed_pod, pod_fact
from rljob_operator.reconcile.observed import ContainerTermination, ObservedPod
from tests.unit.operator.observe.objects import UID, pod


def read(**fields: Any) -> ObservedPod:
    found = observed_pod(pod(**fields))
    assert found is not None
    return found


def ours(**state: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "sidecar", "state": {"running": {}}}, {"name": "rljob", **state}]}


def condition(type_: str, status: str, **more: str) -> dict[str, Any]:
    return {"conditions": [{"type": type_, "status": status, **more}]}


def test_a_fresh_pod() -> None:
    found = read(status={"phase": "Pending"})
    assert (found.name, found.role, found.index, found.attempt) == ("sums-controller", "controller", 0, 1)
    assert found.created_at == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert (found.phase, found.node, found.ready, found.started, found.ended) == ("Pending", None, False, False, False)
    assert {found.unschedulable, found.waiting, found.end, found.disruption} == {None}
    assert {found.deleting, found.gated} == {False}


def test_the_owner_is_the_one_that_controls_it() -> None:
    other = {"kind": "RLJob", "name": "x", "uid": "other"}
    own = {"kind": "RLJob", "name": "sums", "uid": UID, "controller": True}
    assert pod_fact(pod(ownerReferences=[other, own])).owner_uid == UID
    assert pod_fact(pod(ownerReferences=[other])).owner_uid is None


@pytest.mark.parametrize(
    "marks",
    [
        {},
        {"rljob.dev/role": "spy", "rljob.dev/index": "0", "rljob.dev/attempt": "1"},
        {"rljob.dev/role": "policy", "rljob.dev/index": "first", "rljob.dev/attempt": "1"},
        {"rljob.dev/role": "policy", "rljob.dev/index": "0"},
    ],
)
def test_a_pod_without_proper_labels_is_nobodys(marks: dict[str, str]) -> None:
    assert observed_pod(pod(labels=marks)) is None


def test_a_running_pod() -> None:
    status = {"phase": "Running", **ours(state={"running": {"startedAt": "x"}}), **condition("Ready", "True")}
    found = read(spec={"nodeName": "gpu-node"}, status=status)
    assert (found.phase, found.node, found.ready, found.started) == ("Running", "gpu-node", True, True)


def test_when_it_found_its_node() -> None:
    status = condition("PodScheduled", "True", lastTransitionTime="2026-01-02T03:05:00Z")
    assert read(status=status).scheduled_at == datetime(2026, 1, 2, 3, 5, tzinfo=UTC)


def test_what_the_scheduler_says() -> None:
    text = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
    found = read(status=condition("PodScheduled", "False", reason="Unschedulable", message=text))
    assert found.unschedulable == text
    assert found.scheduled_at is None


def test_a_gate_is_no_lack_of_nodes() -> None:
    gates = {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
    found = read(spec=gates, status=condition("PodScheduled", "False", reason="SchedulingGated", message="gated"))
    assert found.gated
    assert found.unschedulable is None


def test_the_trainers_message_is_read() -> None:
    message = TerminationMessage(exit_code=84, message="the task has no such reward")
    terminated = {
        "exitCode": 84,
        "reason": "Error",
        "finishedAt": "2026-01-02T04:00:00Z",
        "message": message.to_json().decode(),
    }
    found = read(status={"phase": "Failed", **ours(state={"terminated": terminated})})
    assert found.end == ContainerTermination(84, "Error", datetime(2026, 1, 2, 4, tzinfo=UTC), message)
    assert found.started
    assert found.ended


def test_any_other_message_is_kept_as_text() -> None:
    terminated = {"exitCode": 137, "reason": "OOMKilled", "message": "x" * 5000}
    end = read(status={"phase": "Failed", **ours(state={"terminated": terminated})}).end
    assert end is not None
    assert (end.exit_code, end.reason, end.message, end.text) == (137, "OOMKilled", None, "x" * 1024)


def test_a_container_that_runs_again_has_not_ended() -> None:
    last = {"terminated": {"exitCode": 1}}
    found = read(status={"phase": "Running", **ours(state={"running": {}}, lastState=last, restartCount=1)})
    assert found.end is None
    assert found.restart_count == 1


def test_why_a_container_does_not_start() -> None:
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}
    assert read(status=ours(state=waiting)).waiting == "ErrImagePull: no such image"
    init = {"initContainerStatuses": [{"name": "fetch", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}]}
    assert read(status={**ours(state=waiting), **init}).waiting == "CrashLoopBackOff: init container fetch"


def test_a_container_that_keeps_failing_is_named_with_its_last_exit() -> None:
    state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}}
    last = {"terminated": {"exitCode": 1, "reason": "Error", "message": "no such bucket"}}
    init = {"initContainerStatuses": [{"name": "fetch", "state": state, "lastState": last}]}
    assert read(status=init).waiting == (
        "CrashLoopBackOff: init container fetch exited with code 1: no such bucket: back-off 5m0s"
    )


def failed_container(name: str, code: int = 1, **more: Any) -> dict[str, Any]:
    return {"name": name, "state": {"terminated": {"exitCode": code, "reason": "Error", **more}}}


def test_the_failed_init_container_is_found() -> None:
    init = {"initContainerStatuses": [failed_container("first", 0), failed_container("second", 7, message="boom")]}
    failure = read(status={"phase": "Failed", **init}).failed_init_container
    assert failure is not None
    assert failure.message("init container", "p") == "init container second of pod p exited with code 7: boom"


def test_a_sidecar_that_is_stopped_with_its_pod_is_no_failure() -> None:
    spec = {"initContainers": [{"name": "proxy", "restartPolicy": "Always"}]}
    status = {"phase": "Succeeded", "initContainerStatuses": [failed_container("proxy", 143)]}
    assert read(spec=spec, status=status).failed_init_container is None


@pytest.mark.parametrize(
    ("own", "phase", "failed"),
    [
        ({}, "Pending", True),  # a sidecar container delays the phase
        ({"restartPolicy": "OnFailure"}, "Pending", False),
        ({"restartPolicyRules": [{"action": "Restart"}], "restartPolicy": "Never"}, "Pending", False),
        ({"restartPolicy": "OnFailure"}, "Failed", True),
    ],
)
def test_an_init_container_has_failed_if_nothing_restarts_it(own: dict[str, Any], phase: str, failed: bool) -> None:
    spec = {"initContainers": [{"name": "fetch", **own}]}
    found = read(spec=spec, status={"phase": phase, "initContainerStatuses": [failed_container("fetch", 1)]})
    assert (found.failed_init_container is not None) == failed


def test_a_trainer_has_ended_though_sidecars_run() -> None:
    running = {"running": {"startedAt": "2026-01-02T03:05:00Z"}}
    spec = {"initContainers": [{"name": "native", "restartPolicy": "Always"}]}
    status = {
        "phase": "Running",
        "initContainerStatuses": [{"name": "native", "state": running}],
        "containerStatuses": [failed_container("rljob", 0), {"name": "istio-proxy", "state": running}],
        "ephemeralContainerStatuses": [{"name": "debugger", "state": running}],
    }
    found = read(spec=spec, status=status)
    assert (found.ended, found.has_terminated) == (True, False)
    assert found.kept_by == "containers native, istio-proxy of pod sums-controller still run"


@pytest.mark.parametrize("sidecar", [failed_container("fetch", 0), failed_container("fetch", 1)])
def test_a_sidecar_that_ends_first_does_not_end_the_trainer(sidecar: dict[str, Any]) -> None:
    unready = condition("Ready", "False", reason="ContainersNotReady")
    trainer = {"name": "rljob", "state": {"running": {}}, "ready": True}
    found = read(status={"phase": "Running", "containerStatuses": [sidecar, trainer], **unready})
    assert (found.ended, found.ready) == (False, True)


def test_a_trainer_is_not_ready_on_a_lost_node() -> None:
    trainer = {"name": "rljob", "state": {"running": {}}, "ready": True}
    found = read(status={"phase": "Running", "containerStatuses": [trainer], **condition("Ready", "False")})
    assert not found.ready


def test_a_container_that_was_lost_with_its_node_is_no_failure() -> None:
    lost = failed_container("fetch", 137, reason="ContainerStatusUnknown")
    assert read(status={"phase": "Failed", "initContainerStatuses": [lost]}).failed_init_container is None


@pytest.mark.parametrize(
    ("status", "message"),
    [
        ({"reason": "Evicted", "message": 'Usage of EmptyDir volume "tmp" exceeds the limit "1Gi". '}, True),
        ({"reason": "Evicted", "message": "The node was low on resource: memory."}, False),
        ({}, False),
    ],
)
def test_an_eviction_is_the_pods_own_fault_unless_its_node_ran_short(status: dict[str, Any], message: bool) -> None:
    under_pressure = {} if message else condition("DisruptionTarget", "True", reason="TerminationByKubelet")
    found = read(status={"phase": "Failed", **status, **under_pressure})
    assert (found.evicted is not None) == message
    assert found.disruption == (None if message else "TerminationByKubelet")


@pytest.mark.parametrize("reason", ["ContainerCreating", "PodInitializing"])
def test_an_ordinary_start_is_no_hindrance(reason: str) -> None:
    assert read(status=ours(state={"waiting": {"reason": reason}})).waiting is None


@pytest.mark.parametrize(
    ("status", "disruption"),
    [
        (condition("DisruptionTarget", "True", reason="PreemptionByScheduler"), "PreemptionByScheduler"),
        (condition("DisruptionTarget", "False", reason="PreemptionByScheduler"), None),
        ({"phase": "Failed", "reason": "NodeLost", **ours(state={"terminated": {"exitCode": 1}})}, "NodeLost"),
        ({"phase": "Failed", "reason": "UnexpectedAdmissionError"}, "UnexpectedAdmissionError"),
        ({"phase": "Failed", "reason": "Error", **ours(state={"terminated": {"exitCode": 1}})}, None),
    ],
)
def test_when_the_cluster_took_it_away(status: dict[str, Any], disruption: str | None) -> None:
    assert read(status=status).disruption == disruption


def test_a_pod_that_is_being_deleted() -> None:
    going = read(deletionTimestamp="2026-01-02T04:00:00Z", deletionGracePeriodSeconds=30)
    assert (going.deleting, going.deletion_grace_seconds) == (True, 30)
    assert going.deletion_due_at == datetime(2026, 1, 2, 4, tzinfo=UTC)
    assert read().deletion_due_at is None


def test_what_a_pod_has_of_host_memory_and_shared_memory() -> None:
    container = {"name": "rljob", "resources": {"limits": {"memory": "1536Mi"}}}
    found = read(spec={"containers": [container], "volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "4Gi"}}]})
    assert (found.memory_limit_bytes, found.shared_memory_bytes) == (3 << 29, 4 << 30)


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"containers": [{"name": "sidecar", "resources": {"limits": {"memory": "1Gi"}}}]},
        {"containers": [{"name": "rljob", "resources": {}}], "volumes": [{"name": "shm", "hostPath": {}}]},
        {"containers": [{"name": "rljob", "resources": {"limits": {"memory": "1500m"}}}]},
    ],
)
def test_no_limit_and_none_that_can_be_read_are_none(spec: dict[str, Any]) -> None:
    assert (read(spec=spec).memory_limit_bytes, read(spec=spec).shared_memory_bytes) == (None, None)


def test_restart_in_place_is_read_from_the_stored_pod() -> None:
    rule = {"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [86]}}
    assert read(spec={"containers": [{"name": "rljob", "restartPolicyRules": [rule]}]}).restarts_in_place
    assert not read(spec={"containers": [{"name": "rljob"}]}).restarts_in_place
    assert read(annotations={"rljob.dev/spec-digest": "abc"}).spec_digest == "abc"


def test_a_scheduled_pod_may_lack_the_time_of_its_condition() -> None:
    condition = {"type": "PodScheduled", "status": "True", "lastTransitionTime": None}
    observed = observed_pod(pod(status={"conditions": [condition]}))
    assert observed
    assert observed.scheduled_at is None
