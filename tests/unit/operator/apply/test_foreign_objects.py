"""Objects that do not belong to the job are neither patched, adopted nor deleted by the executor."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rljob_api.status import RLJobStatus
from rljob_operator.apply.executor import Executor, NameTaken
from rljob_operator.apply.ownership import ForeignObject, LeftBehind
from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.errors import Conflict
from rljob_operator.kube.resources import workloads_served
from rljob_operator.reconcile.desired import Desired, PodDeletion
from tests.unit.operator.apply.execution import (
    CLAIMS,
    JOB,
    OWNER,
    UID,
    Object,
    Recorded,
    Run,
    execute,
    manifest,
    observation,
)
from tests.unit.operator.kube.scripted_api_server import Answer, ScriptedApiServer, Serving, nothing, play, refusal


def existing(kind: str, name: str, *owners: Object) -> Callable[[ScriptedApiServer], None]:
    """An object that exists, with these owners."""
    plural = f"{kind.lower()}s"
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
    assert "create it again with checkpoint.volume.persistentVolumeClaim.claimName" in str(run.error)


def retained_claim(uid: str) -> Callable[[ScriptedApiServer], None]:
    marks = {"rljob.dev/retained": "true", "rljob.dev/job-name": "sums", "rljob.dev/job-uid": uid}
    found = {"metadata": {"name": "c", "uid": "object-uid", "labels": marks}}

    def script(server: ScriptedApiServer) -> None:
        server.answer("POST", "/persistentvolumeclaims", refusal(409, "AlreadyExists"))
        server.answer("GET", "/persistentvolumeclaims/c", Answer(body=found))

    return script


def test_the_retained_claim_of_an_earlier_job_is_not_taken() -> None:
    run = execute(Desired(create=(manifest("PersistentVolumeClaim", "c"),)), script=retained_claim("earlier"))
    assert isinstance(run.error, ForeignObject)
    assert "create the job with checkpoint: {volume: {persistentVolumeClaim: {claimName: c}}}" in str(run.error)
    assert run.writes == [("POST", CLAIMS)]


def test_the_retained_claim_of_the_job_itself_is_its_own() -> None:
    run = execute(Desired(create=(manifest("PersistentVolumeClaim", "c"),)), script=retained_claim(UID))
    assert (run.error, run.writes) == (None, [("POST", CLAIMS)])


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


@pytest.mark.parametrize("kind", ["PersistentVolumeClaim", "ConfigMap", "StepReport"])
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


def test_a_pod_of_a_deleted_job_that_still_terminates_is_waited_for() -> None:
    earlier = {"kind": "RLJob", "name": "sums", "uid": "earlier", "controller": True}
    pod = manifest("Pod", "p", uid="u") | {"status": {}}
    pod["metadata"] |= {"ownerReferences": [earlier], "deletionTimestamp": "2026-01-02T03:04:05Z"}

    def script(server: ScriptedApiServer) -> None:
        server.answer("POST", "/pods", refusal(409, "AlreadyExists"))
        server.answer("GET", "/pods/p", Answer(body=pod))

    run = execute(Desired(create=(manifest("Pod", "p"),)), script=script)
    assert isinstance(run.error, LeftBehind)


@pytest.mark.parametrize(("groups", "version"), [({"kueue.x-k8s.io": "v1beta1"}, "v1beta1"), ({}, "v1beta2")])
def test_workloads_are_deleted_in_the_served_version(groups: dict[str, str], version: str) -> None:
    async def story(serving: Serving) -> None:
        client = ApiClient(serving.connection, concurrency=1)
        executor = Executor(client, Recorded(), lambda _: None)
        executor.workloads = workloads_served(groups)
        await executor.delete_workload("sums-rljob-1", "research")
        await client.close()

    path = f"/apis/kueue.x-k8s.io/{version}/namespaces/research/workloads/sums-rljob-1"
    assert play(story, nothing).writes() == [("DELETE", path)]


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
