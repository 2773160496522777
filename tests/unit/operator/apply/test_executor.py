"""From a decision to writes: their order, what each names as its precondition, and what refusals become."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from rljob_api.status import RLJobStatus
from rljob_operator.apply.event_recorder import EventRecorder
from rljob_operator.apply.executor import Executor, JobGone, NameTaken
from rljob_operator.apply.ownership import ForeignObject, LeftBehind
from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.errors import Conflict, Forbidden
from rljob_operator.kube.retry import RetryPolicy
from rljob_operator.labels import FINALIZER
from rljob_operator.observation import Observation
from rljob_operator.reconcile.bug_report import report_bug
from rljob_operator.reconcile.desired import Desired, EventNote, PodDeletion
from rljob_operator.reconcile.observed import Observed
from tests.unit.operator.kube.scripted_api_server import Answer, ScriptedApiServer, Serving, nothing, play, refusal

Object = dict[str, Any]
Step = Callable[[Executor], Any]

UID = "job-uid"
JOB = "/apis/rljob.dev/v1alpha1/namespaces/research/rljobs/sums"
PODS = "/api/v1/namespaces/research/pods"
OWNER = {"kind": "RLJob", "name": "sums", "uid": UID, "controller": True}


def manifest(kind: str, name: str, attempt: str = "1", **content: Any) -> Object:
    labels = {"rljob.dev/attempt": attempt}
    return {
        "apiVersion": "rljob.dev/v1alpha1" if kind == "StepReport" else "v1",
        "kind": kind,
        "metadata": {"name": name, "namespace": "research", "labels": labels, "ownerReferences": [OWNER]},
    } | content


def observation(finalizers: tuple[str, ...] = (FINALIZER,), **known: Any) -> Observation:
    facts: Object = {
        "job": None,
        "namespace": "research",
        "name": "sums",
        "uid": UID,
        "generation": 1,
        "created_at": datetime(2026, 1, 2, tzinfo=UTC),
        "deleting": False,
        "has_finalizer": FINALIZER in finalizers,
        "pods": (),
        "step_report": None,
        "nodes": (),
    }
    return Observation(Observed(**facts | known), "10", finalizers, {"step": 2, "reward": 0.5})


class Recorded(EventRecorder):
    """Keeps the notes; what becomes of them is the recorder's matter."""

    def __init__(self) -> None:
        self.notes: list[EventNote] = []

    def record(self, job: Observed, note: EventNote) -> None:
        self.notes.append(note)


class Run:
    """What was written, what was seen, which notes were taken."""

    def __init__(
        self, steps: list[tuple[Desired, Observation]], script: Callable[[ScriptedApiServer], None] = nothing
    ) -> None:
        self.seen: list[Object] = []
        self.error: Exception | None = None
        recorder = Recorded()

        async def story(serving: Serving) -> None:
            retry = RetryPolicy(attempts=2, first_seconds=0.001)
            client = ApiClient(serving.connection, concurrency=1, retry=retry)
            executor = Executor(client, recorder, self.seen.append)
            try:
                for desired, state in steps:
                    await executor.execute(desired, state)
            except Exception as error:
                self.error = error
            await client.close()

        server = play(story, script)
        self.asked = server.asked
        self.writes = server.writes()
        self.notes = recorder.notes


def execute(desired: Desired, state: Observation | None = None, script: Any = nothing) -> Run:
    return Run([(desired, state or observation())], script)


def test_writes_come_in_the_order_of_the_fields() -> None:
    note = EventNote("Normal", "JobCompleted", "all steps are committed")
    desired = Desired(
        finalizer=True,
        apply=(manifest("ConfigMap", "sums-rljob"),),
        create=(manifest("StepReport", "sums"), manifest("Pod", "sums-controller")),
        delete_pods=(PodDeletion("sums-policy-0", "u0"),),
        status=RLJobStatus(step=3),
        events=(note,),
    )
    run = execute(desired, observation(finalizers=("other",)))
    assert run.error is None
    assert run.writes == [
        ("PATCH", JOB),
        ("POST", "/api/v1/namespaces/research/configmaps"),
        ("POST", "/apis/rljob.dev/v1alpha1/namespaces/research/stepreports"),
        ("POST", PODS),
        ("DELETE", f"{PODS}/sums-policy-0"),
        ("PATCH", f"{JOB}/status"),
    ]
    assert run.asked[0].body["metadata"]["finalizers"] == ["other", FINALIZER]
    assert run.notes == [note]


def test_a_workload_that_is_gone_is_as_good_as_deleted() -> None:
    workloads = "/apis/kueue.x-k8s.io/v1beta2/namespaces/research/workloads"
    run = execute(
        Desired(delete_workloads=("sums-rljob-1", "sums-rljob-2")),
        script=lambda server: server.answer("DELETE", "/sums-rljob-1", refusal(404, "NotFound")),
    )
    assert run.error is None
    assert run.writes == [("DELETE", f"{workloads}/sums-rljob-1"), ("DELETE", f"{workloads}/sums-rljob-2")]


def test_each_write_of_the_job_names_the_revision_it_was_made_for() -> None:
    run = execute(Desired(status=RLJobStatus(step=3), finalizer=False), observation(finalizers=("a", FINALIZER)))
    status, finalizers = (asked.body for asked in run.asked)
    assert status["metadata"] == {"resourceVersion": "10"}
    assert status["status"]["step"] == 3
    assert status["status"]["reward"] is None, "what the new status does not have goes"
    assert finalizers["metadata"] == {
        "resourceVersion": run.seen[0]["metadata"]["resourceVersion"],
        "finalizers": ["a"],
    }


def test_a_status_that_is_as_stored_is_not_written() -> None:
    stored = RLJobStatus(step=2, reward=0.5).model_dump(mode="json", by_alias=True, exclude_none=True)
    state = observation()
    run = execute(Desired(status=RLJobStatus(step=2, reward=0.5)), Observation(state.observed, "10", (), stored))
    assert run.writes == []


def test_a_status_for_a_state_that_has_passed_is_refused_and_no_event_is_sent() -> None:
    note = EventNote("Normal", "JobCompleted", "all steps are committed")
    run = execute(
        Desired(status=RLJobStatus(step=3), events=(note,), finalizer=False),
        script=lambda server: server.answer("PATCH", "/status", refusal(409, "Conflict")),
    )
    assert isinstance(run.error, Conflict)
    assert run.notes == []
    assert len(run.writes) == 1


def test_a_job_that_is_gone_is_told_as_such() -> None:
    run = execute(
        Desired(status=RLJobStatus(step=3)),
        script=lambda server: server.answer("PATCH", "/status", refusal(404, "NotFound")),
    )
    assert isinstance(run.error, JobGone)


def test_what_was_applied_for_an_attempt_is_not_applied_again_unless_it_differs() -> None:
    first = Desired(apply=(manifest("ConfigMap", "c", data={"a": "1"}),), create=(manifest("Pod", "p"),))
    changed = Desired(apply=(manifest("ConfigMap", "c", data={"a": "2"}),))
    run = Run([(first, observation()), (first, observation()), (changed, observation())])
    assert [method for method, path in run.writes if "configmaps" in path] == ["POST", "PATCH"]


def test_the_next_attempt_trusts_nothing_that_was_made_for_the_last() -> None:
    steps = [
        (Desired(apply=(manifest("Service", "s"),), create=(manifest("Pod", "p", attempt),)), observation())
        for attempt in ("1", "2")
    ]
    services = "/api/v1/namespaces/research/services"
    assert [write for write in Run(steps).writes if "services" in write[1]] == [
        ("POST", services),
        ("PATCH", f"{services}/s"),
    ]


CLAIMS = "/api/v1/namespaces/research/persistentvolumeclaims"


def existing(kind: str, name: str, *owners: Object) -> Callable[[ScriptedApiServer], None]:
    """An object that exists, with these owners."""
    plural = {"PersistentVolumeClaim": "persistentvolumeclaims", "ConfigMap": "configmaps", "Secret": "secrets"}[kind]
    found = manifest(kind, name)
    found["metadata"] |= {"uid": "object-uid", "ownerReferences": list(owners)}

    def script(server: ScriptedApiServer) -> None:
        server.answer("POST", f"/{plural}", refusal(409, "AlreadyExists"))
        server.answer("GET", f"/{plural}/{name}", Answer(body=found))

    return script


@pytest.mark.parametrize(
    "owners", [(), ({"kind": "RLJob", "name": "another", "uid": "x"},), ({"kind": "App", "uid": "y"},)]
)
@pytest.mark.parametrize("kind", ["PersistentVolumeClaim", "ConfigMap"])
def test_what_is_not_the_jobs_is_never_patched(kind: str, owners: tuple[Object, ...]) -> None:
    wanted = (manifest(kind, "sums-x"),)
    desired = Desired(create=wanted) if kind == "PersistentVolumeClaim" else Desired(apply=wanted)
    run = execute(desired, script=existing(kind, "sums-x", *owners))
    assert isinstance(run.error, ForeignObject)
    assert f"{kind} sums-x exists and does not belong to this job" in str(run.error)
    assert [method for method, _ in run.writes] == ["POST"]


def test_the_error_about_a_foreign_claim_names_the_field_to_write() -> None:
    run = execute(
        Desired(create=(manifest("PersistentVolumeClaim", "sums-checkpoints"),)),
        script=existing("PersistentVolumeClaim", "sums-checkpoints"),
    )
    assert "checkpoint.volume.persistentVolumeClaim.claimName" in str(run.error)


def test_a_claim_of_the_job_is_left_as_it_is() -> None:
    run = execute(
        Desired(create=(manifest("PersistentVolumeClaim", "c"),)), script=existing("PersistentVolumeClaim", "c", OWNER)
    )
    assert run.error is None
    assert run.writes == [("POST", CLAIMS)]


def test_an_object_of_the_job_is_applied_to_by_its_uid() -> None:
    run = execute(Desired(apply=(manifest("ConfigMap", "c"),)), script=existing("ConfigMap", "c", OWNER))
    assert run.error is None
    assert (run.asked[-1].method, run.asked[-1].body["metadata"]["uid"]) == ("PATCH", "object-uid")


def test_a_secret_is_neither_read_nor_changed() -> None:
    run = execute(Desired(create=(manifest("Secret", "s"),)), script=existing("Secret", "s"))
    assert run.error is None
    assert [asked.method for asked in run.asked] == ["POST"]


def test_an_object_that_was_replaced_since_it_was_made_is_looked_at_again() -> None:
    def script(server: ScriptedApiServer) -> None:
        server.answer("POST", "/configmaps", Answer(body={"metadata": {"name": "c", "uid": "first"}}))
        server.answer("PATCH", "/configmaps/c", refusal(409, "Conflict"))
        existing("ConfigMap", "c")(server)

    steps = [(Desired(apply=(manifest("ConfigMap", "c", data={"a": text}),)), observation()) for text in "12"]
    run = Run(steps, script)
    assert isinstance(run.error, ForeignObject)
    assert run.asked[1].body["metadata"]["uid"] == "first"
    assert [asked.method for asked in run.asked] == ["POST", "PATCH", "POST", "GET"]


@pytest.mark.parametrize("kind", ["PersistentVolumeClaim", "ConfigMap"])
def test_what_a_deleted_job_left_behind_is_waited_for(kind: str) -> None:
    earlier = {"kind": "RLJob", "name": "sums", "uid": "earlier", "controller": True}
    run = execute(Desired(create=(manifest(kind, "s"),)), script=existing(kind, "s", earlier))
    assert isinstance(run.error, LeftBehind)
    assert "deleted job of this name" in str(run.error)
    assert [method for method, _ in run.writes] == ["POST"]


def test_a_known_foreign_object_does_not_hold_up_the_status() -> None:
    run = execute(
        Desired(create=(manifest("PersistentVolumeClaim", "c"),), status=RLJobStatus(step=3)),
        observation(foreign_object="claim c exists"),
        script=existing("PersistentVolumeClaim", "c"),
    )
    assert isinstance(run.error, ForeignObject)
    assert run.writes[-1] == ("PATCH", f"{JOB}/status")


@pytest.mark.parametrize(("path", "kind"), [("/pods/p", "Pod"), ("/persistentvolumeclaims/c", "PersistentVolumeClaim")])
def test_an_object_that_goes_while_it_is_looked_at_is_a_conflict(path: str, kind: str) -> None:
    collection, _, name = path.rpartition("/")

    def script(server: ScriptedApiServer) -> None:
        server.answer("POST", collection, refusal(409, "AlreadyExists"))
        server.answer("GET", path, refusal(404, "NotFound"))

    run = execute(Desired(create=(manifest(kind, name),)), script=script)
    assert isinstance(run.error, Conflict)


def test_a_pod_that_exists_already_is_known_again() -> None:
    pod = manifest("Pod", "p", uid="u") | {"status": {}}

    def script(server: ScriptedApiServer) -> None:
        server.answer("POST", "/pods", refusal(409, "AlreadyExists"))
        server.answer("GET", "/pods/p", Answer(body=pod))

    run = execute(Desired(create=(manifest("Pod", "p"),)), script=script)
    assert run.error is None
    assert run.seen == [pod]


def test_a_pod_of_somebody_else_is_named_and_left_alone() -> None:
    pod = manifest("Pod", "p")
    pod["metadata"]["ownerReferences"] = []

    def script(server: ScriptedApiServer) -> None:
        server.answer("POST", "/pods", refusal(409, "AlreadyExists"))
        server.answer("GET", "/pods/p", Answer(body=pod))

    run = execute(Desired(create=(manifest("Pod", "p"),), status=RLJobStatus(step=3)), script=script)
    assert isinstance(run.error, NameTaken)
    assert run.error.pod == "p"
    assert [method for method, _ in run.writes] == ["POST"]


@pytest.mark.parametrize("answer", [refusal(404, "NotFound"), refusal(409, "Conflict")])
def test_a_pod_that_is_gone_or_replaced_counts_as_deleted(answer: Answer) -> None:
    run = execute(
        Desired(delete_pods=(PodDeletion("p", "u", grace_seconds=0),), status=RLJobStatus(step=3)),
        script=lambda server: server.answer("DELETE", "/pods/p", answer),
    )
    assert run.error is None
    assert run.asked[0].body == {"preconditions": {"uid": "u"}, "gracePeriodSeconds": 0}
    assert len(run.writes) == 2


def test_a_refusal_ends_the_round_before_the_status_is_written() -> None:
    run = execute(
        Desired(create=(manifest("Pod", "p"),), status=RLJobStatus(step=3)),
        script=lambda server: server.answer("POST", "/pods", refusal(403, "Forbidden", "exceeded quota")),
    )
    assert isinstance(run.error, Forbidden)
    assert len(run.writes) == 1


def test_a_refusal_that_was_known_does_not_hold_up_the_status() -> None:
    run = execute(
        Desired(create=(manifest("Pod", "p"),), status=RLJobStatus(step=3)),
        observation(refused="exceeded quota"),
        script=lambda server: server.answer("POST", "/pods", refusal(403, "Forbidden", "exceeded quota")),
    )
    assert isinstance(run.error, Forbidden)
    assert run.writes[-1] == ("PATCH", f"{JOB}/status")


def test_a_job_whose_time_is_over_is_deleted_by_its_uid() -> None:
    run = execute(Desired(delete_job=True))
    assert [(asked.method, asked.path) for asked in run.asked] == [("DELETE", JOB)]
    assert run.asked[0].body == {"preconditions": {"uid": UID}}


def test_a_bug_is_reported_once_in_a_condition_that_is_false() -> None:
    bug = report_bug(RecursionError("too deep"))
    state = observation()
    known = {"type": "Scheduled", "status": "True"}

    async def story(serving: Serving) -> None:
        client = ApiClient(serving.connection, concurrency=1)
        executor = Executor(client, recorder, lambda _: None)
        await executor.report(bug, Observation(state.observed, "10", (), {"conditions": [known]}))
        [asked] = serving.server.asked
        await executor.report(bug, Observation(state.observed, "11", (), asked.body["status"]))
        await client.close()

    recorder = Recorded()
    server = play(story)
    [asked] = server.asked
    assert (asked.path, asked.body["metadata"]) == (f"{JOB}/status", {"resourceVersion": "10"})
    assert asked.body["status"]["conditions"][0] == known
    failed = asked.body["status"]["conditions"][1]
    assert (failed["type"], failed["status"], failed["reason"]) == ("Failed", "False", "ReconcileError")
    assert "RecursionError: too deep" in failed["message"]
    assert len(recorder.notes) == 1
