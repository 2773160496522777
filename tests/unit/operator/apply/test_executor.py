"""Writes that carry out a decision: order, preconditions, refusals, and objects that do not belong to the job."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from rljob_api.status import RLJobStatus
from rljob_api.step_report import ExitDecision
from rljob_operator.apply import object_writer
from rljob_operator.apply.executor import Executor, JobGone
from rljob_operator.apply.object_writer import ForeignObject, LeftBehind, MissingObject, NameTaken
from rljob_operator.events import EventNote
from rljob_operator.kube.errors import Conflict, Forbidden
from rljob_operator.kube.resources import workloads_served
from rljob_operator.labels import FINALIZER, SHARED
from rljob_operator.names import SHARED_ACCOUNT
from rljob_operator.reconcile.desired import Desired, PodDeletion, PodResize, report_bug
from tests.unit.operator.apply.execution import (
    OWNER,
    UID,
    Execution,
    Object,
    RecordedEvents,
    Script,
    execute,
    existing,
    manifest,
    observed,
)
from tests.unit.operator.kube.scripted_api_server import Answer, Serving, play, refusal

BASE = "/api/v1/namespaces/research"
JOB = "/apis/rljob.dev/v1alpha1/namespaces/research/rljobs/sums"
STATUS = ("PATCH", f"{JOB}/status")
REPORT = ("PATCH", "/apis/rljob.dev/v1alpha1/namespaces/research/stepreports/sums/status")
POD = manifest("Pod", "p")
COMPLETED = EventNote("Normal", "JobCompleted", "all steps are committed")
STEP_3 = RLJobStatus(step=3)


def test_writes_come_in_the_order_of_the_fields() -> None:
    desired = Desired(
        finalizer=True,
        claim="rljob-system/rljob",
        apply=(manifest("ConfigMap", "sums-rljob"),),
        create=(manifest("StepReport", "sums"), manifest("Pod", "sums-controller")),
        delete_pods=(PodDeletion("sums-policy-0", "u0"),),
        status=STEP_3,
        events=(COMPLETED,),
    )
    run = execute(desired, observed(finalizers=("other",)))
    assert run.writes == [
        ("PATCH", JOB),
        ("POST", f"{BASE}/configmaps"),
        ("POST", "/apis/rljob.dev/v1alpha1/namespaces/research/stepreports"),
        ("POST", f"{BASE}/pods"),
        ("DELETE", f"{BASE}/pods/sums-policy-0"),
        STATUS,
    ]
    assert run.asked[0].body["metadata"] == {
        "annotations": {"rljob.dev/operator": "rljob-system/rljob"},
        "finalizers": ["other", FINALIZER],
        "resourceVersion": "10",
    }
    assert run.notes == [COMPLETED]


def test_objects_are_written_at_once_and_pods_after_all_of_them() -> None:
    """A RoleBinding follows its Role: the API server refuses one whose Role does not exist."""
    slow = Answer(201, {"metadata": {"uid": "u"}}, after_seconds=0.05)
    kinds = ("ConfigMap", "Role", "RoleBinding", "Service")
    run = execute(
        Desired(
            apply=tuple(manifest(kind, "sums") for kind in kinds),
            create=(manifest("StepReport", "sums"), manifest("Pod", "p0"), manifest("Pod", "p1")),
        ),
        script=[("POST", end, slow) for end in ("/configmaps", "/roles", "/stepreports")],
    )
    assert set(run.written[:4]) == {"configmaps", "roles", "services", "stepreports"}
    assert run.written[4:] == ["rolebindings", "pods", "pods"]


def test_each_write_of_the_job_names_the_revision_it_was_made_for() -> None:
    run = execute(Desired(status=STEP_3, finalizer=False), observed(finalizers=("a", FINALIZER)))
    status, finalizers = (asked.body for asked in run.asked)
    assert status["metadata"] == {"resourceVersion": "10"}
    assert (status["status"]["step"], status["status"]["reward"]) == (3, None)  # a field that is gone is removed
    revision = run.seen[0]["metadata"]["resourceVersion"]
    assert finalizers["metadata"] == {"resourceVersion": revision, "finalizers": ["a"]}


PROFILE = manifest("MemoryProfile", "qwen3-1", apiVersion="rljob.dev/v1alpha1")
PROFILES = "/apis/rljob.dev/v1alpha1/namespaces/research/memoryprofiles"


def test_a_memory_profile_is_written_before_the_status_that_depends_on_it() -> None:
    run = execute(Desired(profile=PROFILE, delete_profiles=("old",), status=STEP_3))
    assert run.writes == [("PATCH", f"{PROFILES}/qwen3-1"), ("DELETE", f"{PROFILES}/old"), STATUS]
    assert "uid" not in run.asked[0].body["metadata"], "it may not exist yet"


@pytest.mark.parametrize("code", [403, 404, 422])
def test_a_memory_profile_that_is_refused_holds_up_nothing(code: int) -> None:
    refused = [("PATCH", "/qwen3-1", refusal(code, "Refused"))]
    run = execute(Desired(profile=PROFILE, delete_profiles=("old",), status=STEP_3), script=refused)
    assert run.writes == [("PATCH", f"{PROFILES}/qwen3-1"), STATUS]


def test_a_status_that_is_as_stored_is_not_written() -> None:
    status = RLJobStatus(step=2, reward=0.5)
    stored = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert execute(Desired(status=status), observed(raw_status=stored)).writes == []


def test_a_job_whose_time_is_over_is_deleted_by_its_uid() -> None:
    run = execute(Desired(delete_job=True))
    assert run.writes == [("DELETE", JOB)]
    assert run.asked[0].body == {"preconditions": {"uid": UID}}


# --- refusals ---

FORBIDDEN = refusal(403, "Forbidden", "exceeded quota")
CLAIM = manifest("PersistentVolumeClaim", "c")
EXISTS = refusal(409, "AlreadyExists")
GONE = refusal(404, "NotFound")


CLAIMED = ("PATCH", JOB)
CREATE = Desired(create=(POD,), status=STEP_3)
CREATE_CLAIM = Desired(create=(CLAIM,), status=STEP_3)
VERIFY = Desired(verify=(manifest("Service", "gone"),), status=STEP_3)
WRITE = Desired(status=STEP_3, events=(COMPLETED,), finalizer=False)
TAKE = Desired(claim="rljob-system/rljob", create=(POD,))
POST_POD, POST_CLAIM = ("POST", f"{BASE}/pods"), ("POST", f"{BASE}/persistentvolumeclaims")


@pytest.mark.parametrize(
    ("desired", "known", "script", "error", "writes"),
    [
        (WRITE, {}, [(*STATUS, refusal(409, "Conflict"))], Conflict, [STATUS]),
        (WRITE, {}, [(*STATUS, GONE)], JobGone, [STATUS]),
        (TAKE, {}, [(*CLAIMED, refusal(409, "Conflict"))], Conflict, [CLAIMED]),
        (CREATE, {}, [("POST", "/pods", FORBIDDEN)], Forbidden, [POST_POD]),
        # The status reports what was known before, and a lookup does not hold it up.
        (CREATE, {"refused": "quota"}, [("POST", "/pods", FORBIDDEN)], Forbidden, [POST_POD, STATUS]),
        (
            CREATE_CLAIM,
            {"foreign_object": "claim c exists"},
            existing("PersistentVolumeClaim", "c", []),
            ForeignObject,
            [POST_CLAIM, STATUS],
        ),
        (VERIFY, {}, [("GET", "/services/gone", FORBIDDEN)], Forbidden, [STATUS]),
        # The object went while it was looked at.
        (CREATE, {}, [("POST", "/pods", EXISTS), ("GET", "/pods/p", GONE)], Conflict, [POST_POD]),
        (CREATE_CLAIM, {}, [(*POST_CLAIM, EXISTS), ("GET", "claims/c", GONE)], Conflict, [POST_CLAIM]),
    ],
)
def test_a_refusal_ends_the_round(
    desired: Desired, known: dict[str, Any], script: Script, error: type[Exception], writes: list[tuple[str, str]]
) -> None:
    run = execute(desired, observed(**known), script, error)
    assert (run.writes, run.notes) == (writes, [])


@pytest.mark.parametrize("answer", [GONE, refusal(409, "Conflict")])
def test_a_pod_that_is_gone_or_replaced_counts_as_deleted(answer: Answer) -> None:
    desired = Desired(delete_pods=(PodDeletion("p", "u", grace_seconds=0),), status=STEP_3)
    run = execute(desired, script=[("DELETE", "/pods/p", answer)])
    assert run.asked[0].body == {"preconditions": {"uid": "u"}, "gracePeriodSeconds": 0}
    assert len(run.writes) == 2


RESIZE = PodResize("p", "u", 12 << 30, with_request=False)


@pytest.mark.parametrize(("with_request", "names"), [(False, {"limits"}), (True, {"limits", "requests"})])
def test_a_limit_is_raised_in_this_very_pod(with_request: bool, names: set[str]) -> None:
    run = execute(Desired(resize_pods=(replace(RESIZE, with_request=with_request),)))
    (asked,) = run.asked
    assert (asked.method, asked.path) == ("PATCH", f"{BASE}/pods/p/resize")
    assert asked.body == {
        "metadata": {"uid": "u"},
        "spec": {"containers": [{"name": "rljob", "resources": {name: {"memory": "12Gi"} for name in names}}]},
    }


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (refusal(404, "NotFound", message="the server could not find the requested resource"), "could not find"),
        (refusal(403, "Forbidden", message="exceeded quota: memory"), "exceeded quota: memory"),
        (refusal(422, "Invalid", message="Pod QOS Class may not change"), "QOS"),
        (refusal(404, "NotFound", message='pods "p" not found'), ""),
    ],
)
def test_a_refused_limit_is_an_event_and_tried_once(answer: Answer, message: str) -> None:
    larger = Desired(resize_pods=(replace(RESIZE, limit_bytes=16 << 30),))
    rounds = [Desired(resize_pods=(RESIZE,), status=STEP_3), Desired(resize_pods=(RESIZE,)), larger]
    run = Execution([(desired, observed()) for desired in rounds], script=[("PATCH", "/pods/p/resize", answer)] * 2)
    assert run.written == ["resize", "status", "resize"], "the rest is written, too"
    assert [note.reason for note in run.notes] == (["PodNotResized"] * 2 if message else [])
    assert all(message in note.message for note in run.notes)


@pytest.mark.parametrize(("groups", "version"), [({"kueue.x-k8s.io": "v1beta1"}, "v1beta1"), ({}, "v1beta2")])
def test_workloads_are_deleted_in_the_served_version(groups: dict[str, str], version: str) -> None:
    async def story(serving: Serving) -> None:
        executor = Executor(serving.client(), RecordedEvents(), lambda _: None)
        executor.workloads = workloads_served(groups)
        await executor.delete_workload("sums-rljob-1", "research")

    path = f"/apis/kueue.x-k8s.io/{version}/namespaces/research/workloads"
    assert play(story).writes() == [("DELETE", f"{path}/sums-rljob-1")]


def test_a_workload_that_is_gone_counts_as_deleted() -> None:
    run = execute(Desired(delete_workloads=("w-1", "w-2")), script=[("DELETE", "/w-1", GONE)])
    assert run.written == ["w-1", "w-2"]


@pytest.mark.parametrize(("refused", "times"), [(False, 1), (True, 2)], ids=["written", "without a report"])
def test_a_decision_is_written_again_only_if_the_report_was_missing(refused: bool, times: int) -> None:
    desired = Desired(decision=ExitDecision(attempt=1, next_attempt=2, plan_generation=2))
    state = observed(step_report_version="17")
    run = Execution([(desired, state), (desired, state)], [(*REPORT, GONE)] if refused else [])
    assert run.writes == [REPORT] * times
    assert run.asked[0].body["metadata"] == {"resourceVersion": "17"}, "a report that has replaced it gets nothing"


def test_a_bug_is_reported_once_in_a_condition_that_is_false() -> None:
    bug = report_bug(RecursionError("too deep"))
    known = {"type": "Scheduled", "status": "True"}

    async def story(serving: Serving) -> None:
        executor = Executor(serving.client(), recorder, lambda _: None)
        await executor.report(bug, observed(raw_status={"conditions": [known]}))
        await executor.report(bug, observed(raw_status=serving.server.asked[0].body["status"]))

    recorder = RecordedEvents()
    [asked] = play(story).asked
    assert (asked.path, asked.body["metadata"]) == (STATUS[1], {"resourceVersion": "10"})
    kept, failed = asked.body["status"]["conditions"]
    assert kept == known
    assert (failed["type"], failed["status"], failed["reason"]) == ("Failed", "False", "ReconcileError")
    assert "RecursionError: too deep" in failed["message"]
    assert len(recorder.notes) == 1


# --- objects that were written or looked up before ---


def test_applied_objects_are_applied_again_only_if_they_differ() -> None:
    first = Desired(apply=(manifest("ConfigMap", "c", data={"a": "1"}),), create=(POD,))
    changed = Desired(apply=(manifest("ConfigMap", "c", data={"a": "2"}),))
    run = Execution([(desired, observed()) for desired in (first, first, changed)])
    assert [method for method, path in run.writes if "configmaps" in path] == ["POST", "PATCH"]


def test_the_next_attempt_trusts_nothing_that_was_made_for_the_last() -> None:
    steps = [
        (Desired(apply=(manifest("Service", "s"),), create=(manifest("Pod", "p", attempt),)), observed())
        for attempt in ("1", "2")
    ]
    services = [write for write in Execution(steps).writes if "services" in write[1]]
    assert services == [("POST", f"{BASE}/services"), ("PATCH", f"{BASE}/services/s")]


ACCOUNT: Object = {
    "apiVersion": "v1",
    "kind": "ServiceAccount",
    "metadata": {"name": SHARED_ACCOUNT, "namespace": "research", "labels": {SHARED: "true"}},
}
ACCOUNTS = ("POST", f"{BASE}/serviceaccounts")


def test_jobs_of_a_namespace_write_what_they_share_once() -> None:
    other = observed(name="other", uid="other-uid")
    run = Execution([(Desired(apply=(ACCOUNT,)), state) for state in (observed(), other, observed())])
    assert run.writes == [ACCOUNTS]


def test_jobs_that_begin_at_once_write_what_they_share_once() -> None:
    async def story(serving: Serving) -> None:
        executor = Executor(serving.client(concurrency=4), RecordedEvents(), lambda _: None)
        jobs = [observed(name=f"job-{number}", uid=f"uid-{number}") for number in range(4)]
        await asyncio.gather(*(executor.execute(Desired(apply=(ACCOUNT,)), job) for job in jobs))

    assert play(story).writes() == [ACCOUNTS]


def test_what_jobs_share_is_applied_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody may have deleted it since."""
    monkeypatch.setattr(object_writer, "_SHARED_KNOWN_SECONDS", -1.0)
    run = Execution([(Desired(apply=(ACCOUNT,)), observed())] * 2)
    assert [method for method, _ in run.writes] == ["POST", "PATCH"]


@pytest.mark.parametrize(
    ("message", "times"),
    [("exceeded quota", 1), (f'error looking up service account: serviceaccount "{SHARED_ACCOUNT}" not found', 2)],
    ids=["a quota", "the account is gone"],
)
def test_a_shared_account_is_made_again_only_if_it_is_gone(message: str, times: int) -> None:
    desired = Desired(apply=(ACCOUNT,), create=(POD,))
    run = Execution([(desired, observed())] * 2, [("POST", "/pods", refusal(403, "Forbidden", message))], Forbidden)
    assert run.writes.count(ACCOUNTS) == times


def test_a_missing_object_is_named_and_nothing_is_created() -> None:
    run = execute(
        Desired(required_config_map="my-task", create=(POD,)),
        None,
        [("GET", "/configmaps/my-task", GONE)],
        MissingObject,
    )
    expected = "expected ConfigMap my-task (spec.task.files.configMap) in namespace research, found none: create it"
    assert str(run.error) == expected
    assert run.methods == ["GET"]


def test_a_required_object_is_looked_up_once_for_an_attempt() -> None:
    desired = Desired(required_config_map="my-task", apply=(manifest("ConfigMap", "c"),))
    found = Answer(body={"metadata": {"uid": "files"}})
    run = Execution([(desired, observed())] * 2, [("GET", "/configmaps/my-task", found)])
    assert run.methods.count("GET") == 1


def test_deleted_objects_are_created_again_and_others_are_left_alone() -> None:
    here = manifest("ConfigMap", "here")
    gone = [manifest(kind, "gone") for kind in ("Service", "Role", "RoleBinding")]
    run = execute(
        Desired(verify=(here, *gone, manifest("Secret", "token"))),
        script=[
            ("GET", "/configmaps/here", Answer(body=here)),
            *(("GET", f"/{plural}/gone", GONE) for plural in ("services", "roles", "rolebindings")),
            ("POST", "/secrets", EXISTS),
        ],
    )
    assert sorted(run.written) == ["rolebindings", "roles", "secrets", "services"]
    assert run.written.index("roles") < run.written.index("rolebindings")


# --- objects that exist already ---

ANOTHER = {"kind": "RLJob", "name": "another", "uid": "x"}
APP = {"kind": "App", "name": "sums", "uid": "y"}
EARLIER = {"kind": "RLJob", "name": "sums", "uid": "earlier", "controller": True}
LEAVING = {"deletionTimestamp": "2026-01-02T03:04:05Z"}
FOREIGN = "exists and does not belong to this job"
SHARED_MARKS = {"rljob.dev/shared": "true", "app.kubernetes.io/managed-by": "rljob-operator"}


def retained(uid: str) -> dict[str, Any]:
    return {"labels": {"rljob.dev/retained": "true", "rljob.dev/job-name": "sums", "rljob.dev/job-uid": uid}}


@pytest.mark.parametrize(
    ("kind", "owners", "metadata", "error", "message", "methods"),
    [
        ("PersistentVolumeClaim", [], {}, ForeignObject, FOREIGN, ["POST", "GET"]),
        ("PersistentVolumeClaim", [], {}, ForeignObject, "persistentVolumeClaim.claimName", ["POST", "GET"]),
        ("PersistentVolumeClaim", [ANOTHER], {}, ForeignObject, FOREIGN, ["POST", "GET"]),
        ("PersistentVolumeClaim", [EARLIER], {}, LeftBehind, "deleted job of this name", ["POST", "GET"]),
        ("PersistentVolumeClaim", [], retained("earlier"), ForeignObject, "{claimName: c}", ["POST", "GET"]),
        ("PersistentVolumeClaim", [], retained(UID), None, "", ["POST", "GET"]),
        ("PersistentVolumeClaim", [OWNER], {}, None, "", ["POST", "GET"]),
        ("ConfigMap", [], {}, ForeignObject, FOREIGN, ["POST", "GET"]),
        ("ConfigMap", [APP], {}, ForeignObject, FOREIGN, ["POST", "GET"]),
        ("ConfigMap", [EARLIER], {}, LeftBehind, "deleted job of this name", ["POST", "GET"]),
        ("ConfigMap", [OWNER], {}, None, "", ["POST", "GET", "PATCH"]),
        ("StepReport", [EARLIER], {}, LeftBehind, "deleted job of this name", ["POST", "GET"]),
        ("Pod", [], {}, NameTaken, "", ["POST", "GET"]),
        ("Pod", [EARLIER], LEAVING, LeftBehind, "", ["POST", "GET"]),
        ("Pod", [OWNER], {}, None, "", ["POST", "GET"]),
        ("Secret", [], {}, None, "", ["POST"]),
        ("ServiceAccount", [], {}, ForeignObject, "delete or rename that object", ["POST", "GET"]),
        ("ServiceAccount", [APP], {"labels": SHARED_MARKS}, ForeignObject, FOREIGN, ["POST", "GET"]),
        ("ServiceAccount", [], {"labels": SHARED_MARKS}, None, "", ["POST", "GET", "PATCH"]),
    ],
)
def test_only_an_object_of_the_job_is_adopted(
    kind: str,
    owners: list[Object],
    metadata: Object,
    error: type[Exception] | None,
    message: str,
    methods: list[str],
) -> None:
    name = SHARED_ACCOUNT if kind == "ServiceAccount" else "c"
    wanted = ACCOUNT if kind == "ServiceAccount" else manifest(kind, name)
    is_applied = kind in ("ConfigMap", "ServiceAccount")
    desired = Desired(apply=(wanted,)) if is_applied else Desired(create=(wanted,), status=STEP_3 if error else None)
    run = execute(desired, script=existing(kind, name, owners, **metadata), fails=error)
    assert message in str(run.error)
    assert run.methods == methods
    if isinstance(run.error, NameTaken):
        assert run.error.pod == name
    if "PATCH" in methods:
        assert run.asked[-1].body["metadata"]["uid"] == "object-uid"
    if kind == "Pod" and not error:
        assert [found["metadata"]["uid"] for found in run.seen] == ["object-uid"], "it is known again"


def test_an_object_that_was_replaced_since_it_was_made_is_looked_at_again() -> None:
    script = [
        ("POST", "/configmaps", Answer(body={"metadata": {"name": "c", "uid": "first"}})),
        ("PATCH", "/configmaps/c", refusal(409, "Conflict")),
        *existing("ConfigMap", "c", []),
    ]
    steps = [(Desired(apply=(manifest("ConfigMap", "c", data={"a": text}),)), observed()) for text in "12"]
    run = Execution(steps, script, ForeignObject)
    assert run.asked[1].body["metadata"]["uid"] == "first"
    assert run.methods == ["POST", "PATCH", "POST", "GET"]
