"""Writes that carry out a decision: their order, preconditions and refusals."""

from __future__ import annotations

import pytest

from rljob_api.status import RLJobStatus
from rljob_api.step_report import ExitDecision
from rljob_operator.apply.executor import Executor, JobGone, MissingObject
from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.errors import Conflict, Forbidden
from rljob_operator.labels import FINALIZER, SHARED
from rljob_operator.names import SHARED_ACCOUNT
from rljob_operator.observation import Observation
from rljob_operator.reconcile.bug_report import report_bug
from rljob_operator.reconcile.desired import Desired, EventNote, PodDeletion, RequiredObject
from tests.unit.operator.apply.execution import (
    JOB,
    PODS,
    UID,
    Recorded,
    Run,
    execute,
    manifest,
    observation,
)
from tests.unit.operator.kube.scripted_api_server import Answer, ScriptedApiServer, Serving, nothing, play, refusal


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


def test_objects_are_written_at_once_and_pods_after_all_of_them() -> None:
    """A RoleBinding follows its Role: the API server refuses one whose Role does not exist."""

    def slowly(server: ScriptedApiServer) -> None:
        for end in ("/configmaps", "/roles", "/stepreports"):
            server.answer("POST", end, Answer(201, {"metadata": {"uid": "u"}}, after_seconds=0.05))

    rbac = {"apiVersion": "rbac.authorization.k8s.io/v1"}
    run = execute(
        Desired(
            apply=(
                manifest("ConfigMap", "sums-rljob"),
                manifest("Role", "sums-rljob", **rbac),
                manifest("RoleBinding", "sums-rljob", **rbac),
                manifest("Service", "sums-controller"),
            ),
            create=(manifest("StepReport", "sums"), manifest("Pod", "p0"), manifest("Pod", "p1")),
        ),
        script=slowly,
    )
    assert run.error is None
    kinds = [path.rsplit("/", 1)[-1] for _, path in run.writes]
    assert set(kinds[:4]) == {"configmaps", "roles", "services", "stepreports"}
    assert kinds[4:] == ["rolebindings", "pods", "pods"]


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
    run = execute(
        Desired(status=RLJobStatus(step=2, reward=0.5)), Observation(lambda: state.observed, "10", (), lambda: stored)
    )
    assert run.writes == []


def test_a_stale_status_is_refused_and_sends_no_event() -> None:
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


def test_applied_objects_are_applied_again_only_if_they_differ() -> None:
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


def test_a_refusal_ends_the_round_before_the_status_is_written() -> None:
    run = execute(
        Desired(create=(manifest("Pod", "p"),), status=RLJobStatus(step=3)),
        script=lambda server: server.answer("POST", "/pods", refusal(403, "Forbidden", "exceeded quota")),
    )
    assert isinstance(run.error, Forbidden)
    assert len(run.writes) == 1


ACCOUNT = {
    "apiVersion": "v1",
    "kind": "ServiceAccount",
    "metadata": {"name": SHARED_ACCOUNT, "namespace": "research", "labels": {SHARED: "true"}},
}
ACCOUNTS = ("POST", "/api/v1/namespaces/research/serviceaccounts")


def test_jobs_of_a_namespace_write_what_they_share_once() -> None:
    other = observation(name="other", uid="other-uid")
    run = Run([(Desired(apply=(ACCOUNT,)), state) for state in (observation(), other, observation())])
    assert run.error is None
    assert run.writes == [ACCOUNTS]


@pytest.mark.parametrize(
    ("message", "times"),
    [("exceeded quota", 1), (f'error looking up service account: serviceaccount "{SHARED_ACCOUNT}" not found', 2)],
    ids=["a quota", "the account is gone"],
)
def test_a_shared_account_is_made_again_only_if_it_is_gone(message: str, times: int) -> None:
    desired = Desired(apply=(ACCOUNT,), create=(manifest("Pod", "p"),))
    run = Run(
        [(desired, observation()), (desired, observation())],
        script=lambda server: server.answer("POST", "/pods", refusal(403, "Forbidden", message)),
    )
    assert isinstance(run.error, Forbidden)
    assert run.writes.count(ACCOUNTS) == times


def test_a_claim_comes_first_in_one_write_with_the_finalizer() -> None:
    desired = Desired(claim="rljob-system/rljob", finalizer=True, create=(manifest("Pod", "p"),))
    run = execute(desired, observation(finalizers=("a",)))
    assert run.writes == [("PATCH", JOB), ("POST", PODS)]
    metadata = run.asked[0].body["metadata"]
    assert metadata["annotations"] == {"rljob.dev/operator": "rljob-system/rljob"}
    assert metadata["finalizers"] == ["a", FINALIZER]
    assert metadata["resourceVersion"] == "10"


def test_a_job_that_another_operator_has_claimed_meanwhile_gets_nothing() -> None:
    run = execute(
        Desired(claim="rljob-system/rljob", create=(manifest("Pod", "p"),)),
        script=lambda server: server.answer("PATCH", JOB, refusal(409, "Conflict", "the object has been modified")),
    )
    assert isinstance(run.error, Conflict)
    assert run.writes == [("PATCH", JOB)]


REPORT = ("PATCH", "/apis/rljob.dev/v1alpha1/namespaces/research/stepreports/sums/status")


@pytest.mark.parametrize(("refused", "times"), [(False, 1), (True, 2)], ids=["written", "without a report"])
def test_a_decision_is_written_once_or_again_if_there_was_no_report(refused: bool, times: int) -> None:
    desired = Desired(decision=ExitDecision(attempt=1, next_attempt=2, plan_generation=2))
    answers = (lambda server: server.answer(*REPORT, refusal(404, "NotFound", "no report"))) if refused else nothing
    state = observation(step_report_version="17")
    run = Run([(desired, state), (desired, state)], script=answers)
    assert run.error is None
    assert run.writes == [REPORT] * times
    assert run.asked[0].body["metadata"] == {"resourceVersion": "17"}, "a report that has replaced it gets nothing"


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
        await executor.report(bug, Observation(lambda: state.observed, "10", (), lambda: {"conditions": [known]}))
        [asked] = serving.server.asked
        await executor.report(bug, Observation(lambda: state.observed, "11", (), lambda: asked.body["status"]))
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


FILES = RequiredObject("my-task", "research", "spec.task.files.configMap")


def test_a_missing_object_is_named_and_nothing_is_created() -> None:
    run = execute(
        Desired(require=(FILES,), create=(manifest("Pod", "p"),)),
        script=lambda server: server.answer("GET", "/configmaps/my-task", refusal(404, "NotFound")),
    )
    assert isinstance(run.error, MissingObject)
    assert str(run.error) == (
        "expected ConfigMap my-task (spec.task.files.configMap) in namespace research, found none: create it"
    )
    assert [asked.method for asked in run.asked] == ["GET"]


def test_a_required_object_is_looked_up_once_for_an_attempt() -> None:
    desired = Desired(require=(FILES,), apply=(manifest("ConfigMap", "c"),))
    run = Run(
        [(desired, observation())] * 2,
        lambda server: server.answer("GET", "/configmaps/my-task", Answer(body={"metadata": {"uid": "files"}})),
    )
    assert run.error is None
    assert [asked.method for asked in run.asked].count("GET") == 1


def test_a_deleted_object_is_created_again_and_others_are_left_alone() -> None:
    verify = (manifest("ConfigMap", "here"), manifest("Service", "gone"), manifest("Secret", "token"))

    def script(server: ScriptedApiServer) -> None:
        server.answer("GET", "/configmaps/here", Answer(body=manifest("ConfigMap", "here")))
        server.answer("GET", "/services/gone", refusal(404, "NotFound"))
        server.answer("POST", "/secrets", refusal(409, "AlreadyExists"))

    run = execute(Desired(verify=verify), script=script)
    assert run.error is None
    base = "/api/v1/namespaces/research"
    assert sorted(run.writes) == [("POST", f"{base}/secrets"), ("POST", f"{base}/services")]


def test_a_deleted_role_binding_is_created_after_its_role() -> None:
    def script(server: ScriptedApiServer) -> None:
        server.answer("GET", "/roles/s", refusal(404, "NotFound"))
        server.answer("GET", "/rolebindings/s", refusal(404, "NotFound"))

    rbac = {"apiVersion": "rbac.authorization.k8s.io/v1"}
    run = execute(Desired(verify=(manifest("Role", "s", **rbac), manifest("RoleBinding", "s", **rbac))), script=script)
    assert run.error is None
    assert [path.rpartition("/")[2] for _, path in run.writes] == ["roles", "rolebindings"]
    assert [asked.method for asked in run.asked] == ["GET", "POST", "GET", "POST"]


def test_a_lookup_that_is_refused_does_not_hold_up_the_status() -> None:
    run = execute(
        Desired(verify=(manifest("Service", "gone"),), status=RLJobStatus(step=3)),
        script=lambda server: server.answer("GET", "/services/gone", refusal(403, "Forbidden")),
    )
    assert isinstance(run.error, Forbidden)
    assert run.writes == [("PATCH", f"{JOB}/status")]
