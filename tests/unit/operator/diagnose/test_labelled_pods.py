"""Labelled pods of any workload: their out-of-memory failures become Events and a metric, within bounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rljob_operator.apply.event_recorder import EventRecorder
from rljob_operator.diagnose.explanation import ContainerEnd, OutOfMemoryCause, container_ends, explanation_of
from rljob_operator.diagnose.labelled_pods import LabelledPods, owner_resource
from rljob_operator.events import Subject
from rljob_operator.metrics import REGISTRY
from tests.unit.operator.kube.scripted_api_server import (
    Answer,
    Asked,
    ScriptedApiServer,
    Serving,
    nothing,
    play,
    refusal,
)

Object = dict[str, Any]
GPU_ERROR = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB "
    "of which 1.00 GiB is free. Of the allocated memory 40.00 GiB is allocated by PyTorch, and 37.00 GiB is reserved "
    "by PyTorch but unallocated."
)


def pod(*states: Object, name: str = "train-x", owner: Object | None = None, **status: Any) -> Object:
    """A pod whose container `trainer` ended in these ways: the last is its present state."""
    ends = {key: {"terminated": state} for key, state in zip(("state", "lastState"), states[::-1], strict=False)}
    owners = [{"controller": True, **owner}] if owner else []
    containers = [{"name": "trainer", **ends}] if states else []
    return {
        "metadata": {"name": name, "namespace": "research", "uid": f"uid-{name}", "ownerReferences": owners},
        "spec": {"containers": [{"name": "trainer", "resources": {"limits": {"memory": "512Mi"}}}]},
        "status": {"containerStatuses": containers, **status},
    }


def killed(seconds_ago: float = 1.0) -> Object:
    return {"reason": "OOMKilled", "exitCode": 137, "finishedAt": stamp(seconds_ago)}


def reported(message: str = GPU_ERROR, exit_code: int = 80, **evidence: Any) -> Object:
    """The termination message that the probe writes."""
    found = {"time": stamp(1), "attempt": 1, "role": "policy", "rank": 3, "step": 7, "message": message, **evidence}
    text = json.dumps({"exitCode": exit_code, "message": "rank 3 ran out of GPU memory", "evidence": found})
    return {"reason": "Error", "exitCode": 1, "finishedAt": stamp(1), "message": text}


def stamp(seconds_ago: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds_ago)).strftime("%Y-%m-%dT%H:%M:%SZ")


JOB = {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "job-1"}
JOBSET = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": "ddp", "uid": "set-1"}


Script = Callable[[ScriptedApiServer], None]


def metadata_of(path: str, uid: str, owner: Object | None = None, times: int = 1) -> Script:
    owners = [{"controller": True, **owner}] if owner else []
    body = {"metadata": {"name": path.rsplit("/", 1)[-1], "uid": uid, "ownerReferences": owners}}
    return lambda server: server.answer("GET", path, Answer(body=body), times)


def asked(pods: list[Object], script: Script = nothing, writes: int = 1) -> list[Asked]:
    """Requests of the operator after it saw these pods, and made `writes` Events."""

    async def story(serving: Serving) -> None:
        client = serving.client()
        recorder = EventRecorder(client, instance="operator-0")
        labelled = LabelledPods(client, recorder)
        serving.run(labelled.run())
        serving.run(recorder.run())
        for found in pods:
            labelled.put(found)
        await labelled.flush()
        await recorder.flush()

    server = play(story, script)
    assert len(server.writes()) == writes
    return server.asked


def events(requests: list[Asked]) -> list[Object]:
    return [request.body for request in requests if request.method == "POST"]


def count(class_: str, kind: str) -> float:
    labels = {"class": class_, "kind": kind}
    return REGISTRY.get_sample_value("rljob_operator_diagnosed_failures_total", labels) or 0.0


# --- the cause ---

EVICTED = "The node was low on resource: memory. Threshold quantity: 100Mi."
POD = {"apiVersion": "v1", "kind": "Pod", "namespace": "research", "name": "train-x", "uid": "uid-train-x"}
ANSI = "torch.OutOfMemoryError: CUDA out of memory. \x1b[31m\x07\u202e\u2028\r\nTried"


@pytest.mark.parametrize(
    ("ended", "note"),
    [
        (lambda: pod(killed()), "container trainer ran out of memory: HostMemory (95%)"),
        (lambda: pod(killed()), "memory limit of 512Mi"),
        (lambda: pod(reported()), "Fragmentation"),
        (lambda: pod(reported()), "37.0"),
        (lambda: pod(reported(ANSI)), "CUDA out of memory"),
        (lambda: pod(reason="Evicted", message=EVICTED), "the pod ran out of memory: HostMemory"),
        (
            lambda: pod(reason="Evicted", message="The node had condition: [MemoryPressure]. "),
            "the pod ran out of memory: HostMemory",
        ),
        (
            lambda: pod(reason="Evicted", message='Usage of EmptyDir volume "dshm" exceeds the limit "16Gi". '),
            "the pod ran out of memory: SharedMemory",
        ),
    ],
)
def test_an_out_of_memory_failure_becomes_an_event_with_its_cause(ended: Callable[[], Object], note: str) -> None:
    [event] = events(asked([ended()]))  # built now: failures of half an hour ago are too old to report
    assert event["reason"] == "OutOfMemory"
    assert event["regarding"] == POD
    assert note in event["note"]
    assert event["note"].isprintable()


def test_diagnoses_that_a_pod_states_itself_do_not_count() -> None:
    claimed = [{"class": "Nonsense" * 4, "confidence": 1.0, "message": "trust me", "numbers": {}}]
    [end] = container_ends(pod(reported(diagnoses=claimed)))
    explanation = explanation_of(end)
    assert explanation is not None
    assert explanation.class_name == "Fragmentation"


@pytest.mark.parametrize(
    "ended",
    [
        pytest.param(lambda: pod({"reason": "Completed", "exitCode": 0, "finishedAt": stamp(1)}), id="completed"),
        pytest.param(
            lambda: pod({"reason": "Error", "exitCode": 1, "finishedAt": stamp(1), "message": "{"}), id="no message"
        ),
        pytest.param(lambda: pod(reported(exit_code=1)), id="another failure"),
        pytest.param(lambda: pod(killed(seconds_ago=3600)), id="an old one"),
        pytest.param(
            lambda: pod(reason="Evicted", message="The node was low on resource: ephemeral-storage."), id="disk"
        ),
        pytest.param(
            lambda: pod(reason="Evicted", message='Usage of EmptyDir volume "data" exceeds the limit "1Gi".'), id="data"
        ),
        pytest.param(lambda: {"metadata": {"name": "new", "namespace": "research", "uid": "1"}}, id="no status"),
    ],
)
def test_other_ends_are_not_reported(ended: Callable[[], Object]) -> None:
    asked([ended()], writes=0)


# --- once ---


def test_each_restart_of_a_container_is_reported_once() -> None:
    first, second = killed(seconds_ago=20), killed()
    made = events(asked([pod(first), pod(first), pod(first, second), pod(first, second)], writes=2))
    assert len({event["metadata"]["name"] for event in made}) == 2


def test_a_failure_that_an_earlier_process_reported_is_not_counted() -> None:
    before = count("HostMemory", "Pod")
    exists = refusal(409, "AlreadyExists")
    asked([pod(killed())], lambda server: server.answer("POST", "/events", exists))
    assert count("HostMemory", "Pod") == before


# --- owners ---


def test_the_top_owner_gets_an_event_and_is_counted_by_its_kind() -> None:
    def script(server: ScriptedApiServer) -> None:
        metadata_of("/namespaces/research/jobs/train", "job-1", JOBSET)(server)
        metadata_of("/namespaces/research/jobsets/ddp", "set-1")(server)

    before = count("HostMemory", "JobSet")
    of_pod, of_owner = events(asked([pod(killed(), owner=JOB)], script, writes=2))
    assert of_owner["regarding"] == {**JOBSET, "namespace": "research"}
    assert of_owner["note"] == f"pod train-x: {of_pod['note']}"[: len(of_owner["note"]) - 1] + of_owner["note"][-1]
    assert count("HostMemory", "JobSet") == before + 1


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(metadata_of("/jobs/train", "another"), id="another object of this name"),
        pytest.param(lambda server: server.answer("GET", "/jobs/train", refusal(404, "NotFound")), id="no such object"),
        pytest.param(lambda server: server.answer("GET", "/jobs/train", refusal(403, "Forbidden")), id="no right"),
    ],
)
def test_an_owner_that_is_only_claimed_gets_no_event(script: Script) -> None:
    before = count("HostMemory", "Pod")
    [event] = events(asked([pod(killed(), owner=JOB)], script))
    assert event["regarding"]["kind"] == "Pod"
    assert count("HostMemory", "Pod") == before + 1


def test_owners_in_a_circle_end_after_four_requests() -> None:
    requests = asked([pod(killed(), owner=JOB)], metadata_of("/jobs/train", "job-1", JOB, times=10), writes=2)
    assert len([request for request in requests if request.method == "GET"]) == 4


@pytest.mark.parametrize(
    "owner",
    [
        Subject("batch/v1", "Job", "research", "../../../../../api/v1/namespaces/kube-system/secrets/x", "u"),
        Subject("batch/v1?x=", "Job", "research", "train", "u"),
        Subject("batch/../v1", "Job", "research", "train", "u"),
        Subject("v1", "Secret", "research", "token", "u"),
        Subject("batch/v1", "Job", "research", "", "u"),
        Subject("batch/v1", "Job", "research", "a" * 300, "u"),
    ],
)
def test_a_reference_that_no_api_server_would_make_is_not_followed(owner: Subject) -> None:
    assert owner_resource(owner) is None


# --- a hostile tenant ---


def test_a_namespace_has_an_allowance_beyond_which_nothing_is_diagnosed(monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosed = []

    def recorded(end: ContainerEnd) -> OutOfMemoryCause | None:
        diagnosed.append(end)
        return explanation_of(end)

    monkeypatch.setattr("rljob_operator.diagnose.labelled_pods.explanation_of", recorded)
    monkeypatch.setattr("rljob_operator.diagnose.labelled_pods._SECONDS_PER_TOKEN", 1e9)  # no new token
    flood = [pod(reported(), name=f"p{number}") for number in range(150)]
    other = pod(killed(), name="honest")
    other["metadata"]["namespace"] = "team-b"
    made = events(asked([*flood, other], writes=101))
    assert made[-1]["regarding"]["name"] == "honest"
    assert len(diagnosed) == 101


def test_the_ends_of_a_pod_are_bounded_and_include_its_sidecars() -> None:
    found = pod(killed())
    [status] = found["status"]["containerStatuses"]
    found["status"]["containerStatuses"] = [{**status, "name": f"c{number}"} for number in range(200)]
    assert len(list(container_ends(found))) == 16
    found = pod()
    found["spec"]["initContainers"] = [{"name": "server", "resources": {"limits": {"memory": "64Mi"}}}]
    found["status"]["initContainerStatuses"] = [{"name": "server", "lastState": {"terminated": killed()}}]
    [end] = container_ends(found)
    assert (end.container, end.memory_limit_bytes) == ("server", 64 << 20)
    [end] = container_ends(pod({"reason": "Error", "exitCode": 1, "message": "x" * 100_000, "finishedAt": stamp(1)}))
    assert len(end.text) == 4096
