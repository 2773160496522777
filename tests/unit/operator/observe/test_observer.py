"""Observations of one job from the caches, the keys that changes wake, and the watches that fill the caches."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import Configuration

from rljob_operator.kube.client import ApiClient, Connection
from rljob_operator.kube.resources import MEMORY_PROFILES, RLJOBS
from rljob_operator.kube.watch import Key, Reflector
from rljob_operator.metrics import JOBS, WATCH_AGE_SECONDS
from rljob_operator.observe import job_facts
from rljob_operator.observe.job_facts import unpack
from rljob_operator.observe.observer import CHECK_SECONDS, Observer
from rljob_operator.observe.watches import OWN_OBJECTS, Attendance, reflectors
from rljob_operator.reconcile.observed import ObservedJob, ObservedNode
from rljob_operator.runtime.endpoints import Health
from tests.unit.operator.kube.scripted_api_server import Answer, ScriptedApiServer, Serving, play
from tests.unit.operator.observe.objects import UID, Object, job, node, pod, step_report

SUMS: Key = ("research", "sums")
LEAVING: Object = {"deletionTimestamp": "2026-01-02T04:00:00Z"}
OF_A_DELETED_JOB: Object = {"ownerReferences": [{"uid": "of-a-deleted-job", "controller": True}]}
SCHEDULED = {"conditions": [{"type": "Scheduled", "status": "True"}]}


class Woken(list[Key]):
    def taken(self) -> set[Key]:
        keys = set(self)
        self.clear()
        return keys


@pytest.fixture
def woken() -> Woken:
    return Woken()


@pytest.fixture
def observer(woken: Woken) -> Observer:
    return Observer(("nvidia.com/gpu", "amd.com/gpu"), woken.append)


def seen(observer: Observer) -> ObservedJob:
    observe = observer.observe(SUMS)
    assert observe is not None
    return observe()


def test_a_job_is_put_together_from_all_caches(observer: Observer) -> None:
    observer.pods.put(pod())
    assert observer.observe(SUMS) is None
    observer.jobs.put(job(status={"step": 3}))
    observer.step_reports.put(step_report(step=4))
    observer.nodes.put(node("gpu-node", gpus="8"))
    observer.set_api_groups(frozenset({"apps", "kueue.x-k8s.io"}))
    found = seen(observer)
    assert (found.resource_version, found.raw_status) == ("10", {"step": 3})
    assert found.job is not None
    assert [pod.name for pod in found.pods] == ["sums-controller"]
    assert found.step_report is not None
    assert found.step_report.step == 4
    assert found.nodes == (ObservedNode("gpu-node", gpus=8, usable=True),)
    assert (found.kueue_installed, found.volcano_installed) == (True, False)
    assert found.fresh_token != seen(observer).fresh_token
    observer.pods.remove(pod(version=21))
    assert seen(observer).pods == ()


def test_pods_that_are_not_the_jobs_own_are_foreign_or_waited_for(observer: Observer) -> None:
    observer.jobs.put(job())
    observer.pods.put(pod("a", ownerReferences=[]))
    observer.pods.put(pod("b", **OF_A_DELETED_JOB))
    observer.pods.put(pod("c", labels={"rljob.dev/job-name": "sums"}))
    observer.pods.put(pod("leaving", **OF_A_DELETED_JOB, **LEAVING))
    assert (seen(observer).pods, seen(observer).foreign_pods) == ((), ("a", "b", "c"))
    assert "pod leaving of a deleted job of this name" in (seen(observer).left_behind or "")


def test_workloads_of_a_job_that_is_gone_release_its_queued_pods(observer: Observer) -> None:
    gated: Object = {"spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}}
    observer.pods.put(pod(**gated, **LEAVING))
    assert observer.orphaned_workloads(SUMS) == (), "there is no Kueue"
    observer.set_api_groups(frozenset({"kueue.x-k8s.io"}))
    assert observer.orphaned_workloads(SUMS) == ("sums-rljob-1",)
    observer.pods.put(pod(version=21, **LEAVING))
    assert observer.orphaned_workloads(SUMS) == (), "it was admitted"


def test_a_job_of_another_manager_is_in_no_metric_and_waits_for_no_node(observer: Observer) -> None:
    spec = {"managedBy": "kueue.x-k8s.io/multikueue"}
    before = counted()
    observer.jobs.put(job(spec=spec, status={"display": {"phase": "Running"}}))
    assert seen(observer).delegated
    assert counted() == before
    assert not observer.runs(SUMS)
    observer.unplaced.wake_later()
    assert observer.unplaced.next_portion() == []
    observer.jobs.forget(SUMS)
    assert counted() == before


def counted() -> dict[str, float]:
    """Jobs by phase, as the metric has them."""
    [metric] = JOBS.collect()
    return {sample.labels["phase"]: sample.value for sample in metric.samples if sample.value}


def test_a_change_wakes_its_job_and_no_other(observer: Observer, woken: Woken) -> None:
    observer.jobs.put(job())
    observer.jobs.put(job("other"))
    woken.clear()
    observer.pods.put(pod())
    assert woken.taken() == {SUMS}
    observer.pods.put(pod(version=21))
    assert woken.taken() == set(), "nothing has changed but the revision"
    observer.step_reports.put(step_report(step=1))
    assert woken.taken() == {SUMS}
    observer.pods.remove(pod(version=22))
    assert woken.taken() == {SUMS}


def test_a_node_with_room_wakes_the_jobs_that_have_no_nodes(observer: Observer, woken: Woken) -> None:
    observer.jobs.put(job())
    observer.jobs.put(job("placed", status=SCHEDULED))
    woken.clear()
    observer.nodes.put(node())
    assert woken.taken() == set(), "they are woken in portions"
    assert observer.unplaced.next_portion() == [SUMS]
    observer.nodes.put(node(version=31, annotations={"heartbeat": "2"}))
    observer.nodes.put(node(version=32, spec={"unschedulable": True}))
    assert observer.unplaced.next_portion() == []
    assert seen(observer).nodes == (ObservedNode("cpu-node", gpus=0, usable=False),)


@pytest.mark.parametrize(
    ("status", "placed", "runs"),
    [
        ({}, False, False),
        (SCHEDULED, True, True),
        ({"display": {"phase": "Recovering"}}, False, True),
        ({"display": {"phase": "Complete"}}, True, False),
    ],
)
def test_jobs_that_have_or_need_no_nodes_and_those_that_run(
    observer: Observer, status: Object, placed: bool, runs: bool
) -> None:
    observer.jobs.put(job(status=status))
    assert (job_facts.job_fact(job(status=status)).placed, observer.runs(SUMS)) == (placed, runs)


def test_a_reconcile_unpacks_the_job_once(observer: Observer, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []

    def recorded(packed: bytes) -> bytes:
        parsed.append(packed)
        return unpack(packed)

    monkeypatch.setattr(job_facts, "unpack", recorded)
    observer.jobs.put(job(status={"step": 3}))
    observe = observer.observe(SUMS)
    assert observe is not None
    assert len(parsed) == 0
    found = observe()
    assert (len(parsed), found.name, found.job is None) == (1, "sums", False)
    assert found.raw_status == {"step": 3}
    assert len(parsed) == 1


def test_refusals_last_until_everything_is_made_or_the_job_is_another(observer: Observer) -> None:
    observer.jobs.put(job())
    observer.refusals(SUMS).refused = "exceeded quota"
    observer.refusals(SUMS).name_taken("sums-controller")
    observer.refusals(SUMS).namespace_terminating = True
    found = seen(observer)
    known = (found.refused, found.foreign_pods, found.namespace_terminating)
    assert known == ("exceeded quota", ("sums-controller",), True)
    observer.accepted(SUMS)
    assert (seen(observer).refused, seen(observer).foreign_pods) == (None, ())
    observer.refusals(SUMS).refused = "exceeded quota"
    observer.jobs.put(job(version=11, uid="another"))
    assert seen(observer).refused is None


def test_answers_to_writes_are_known_at_once(observer: Observer) -> None:
    observer.saw(job())
    observer.saw(pod())
    observer.saw({"kind": "Status", "status": "Success"})
    assert [found.uid for found in seen(observer).pods] == ["uid-of-sums-controller"]
    assert seen(observer).uid == UID


def test_lookups_of_objects_are_spread_and_follow_a_deleted_report() -> None:
    first = set()
    for _ in range(5):
        observer = Observer((), lambda _key: None)
        observer.jobs.put(job())
        assert 0 < (seen(observer).objects_check_seconds or 0) <= CHECK_SECONDS
        first.add(seen(observer).objects_check_seconds)
    assert len(first) == 5
    observer.step_reports.put(step_report(step=1))
    observer.step_reports.remove(step_report(version=41))
    assert seen(observer).objects_check_seconds == 0
    observer.objects_checked(SUMS, failed=True)
    observer.objects_checked(SUMS)
    assert (seen(observer).objects_check_seconds or 0) > CHECK_SECONDS / 2
    observer.step_reports.put(step_report(version=42, step=1))
    observer.objects_checked(SUMS, failed=True)
    observer.step_reports.remove(step_report(version=43))  # during the lookup
    observer.objects_checked(SUMS)
    assert seen(observer).objects_check_seconds == 0


# --- MemoryProfiles ---


def memory_profile(namespace: str, used: str, version: int) -> Object:
    metadata = {"name": "qwen3-1", "namespace": namespace, "resourceVersion": str(version)}
    return {"kind": "MemoryProfile", "metadata": metadata, "status": {"lastUsedTime": used}}


@pytest.mark.parametrize("shares_profiles", [False, True])
def test_a_job_sees_the_profiles_of_its_namespace_and_others_if_they_are_shared(shares_profiles: bool) -> None:
    observer = Observer((), lambda _: None, shares_profiles=shares_profiles)
    observer.jobs.put(job())
    for namespace, used, version in (("research", "2026-01-01", 1), ("a", "2026-01-03", 2), ("b", "2026-01-02", 3)):
        observer.saw(memory_profile(namespace, f"{used}T00:00:00Z", version))
    before = seen(observer)
    assert before.profiles["qwen3-1"].namespace == "research"
    shared = {name: profile.namespace for name, profile in before.shared_profiles.items()}
    assert shared == ({"qwen3-1": "a"} if shares_profiles else {})
    for namespace in ("a", "research"):
        observer.profiles.remove(memory_profile(namespace, "", 9))
    assert seen(observer).profiles == {}
    assert [profile.namespace for profile in seen(observer).shared_profiles.values()] == ["b"] * shares_profiles
    assert before.profiles, "an observation does not change"


# --- watches ---


def test_each_namespace_has_a_watch_of_each_kind() -> None:
    async def story(serving: Serving) -> None:
        client = serving.client()
        observer = Observer((), lambda _: None)
        for namespaces, watched in ((("a", "b"), ("a", "b")), ((), (None,))):
            watches = reflectors(client, observer, namespaces, watch_nodes=bool(namespaces))
            kinds = [(watch.resource.plural, watch.namespace, watch._label_selector) for watch in watches]
            selectors = (("rljobs", ""), ("pods", OWN_OBJECTS), ("stepreports", OWN_OBJECTS))
            nodes = [("nodes", None, "")] if namespaces else []
            assert kinds == [(kind, where, selector) for where in watched for kind, selector in selectors] + nodes

    play(story)


def test_the_operator_works_without_the_right_to_watch_memory_profiles() -> None:
    async def story(watches: list[Reflector], attendance: Attendance) -> None:
        profiles = [watch for watch in watches if watch.optional]
        assert [watch.resource for watch in profiles] == [MEMORY_PROFILES] * 2
        for watch in watches:
            await watch.settled.wait()
        assert all(attendance.includes(namespace) for namespace in ("team-a", "team-b"))
        assert not any(watch.synced.is_set() for watch in profiles)

    cluster = TwoNamespaces(set(), refused_resource="memoryprofiles")
    asyncio.run(cluster.watch(story))


def test_a_job_deleted_while_the_watch_was_down_is_removed() -> None:
    def listing(version: int, *items: Object) -> Answer:
        return Answer(body={"items": list(items), "metadata": {"resourceVersion": str(version)}})

    def script(server: ScriptedApiServer) -> None:
        expired: Object = {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}
        server.answer("GET", "/rljobs", listing(20, job("a"), job("b")))
        server.answer("GET", "/rljobs", Answer(lines=[expired]))
        server.answer("GET", "/rljobs", listing(30, job("b")))
        server.answer("GET", "/rljobs", Answer(lines=[], open_seconds=60))

    async def story(serving: Serving) -> None:
        observer = Observer((), lambda _: None)
        client = serving.client(concurrency=2)
        [watch] = [found for found in reflectors(client, observer, (), watch_nodes=False) if found.resource is RLJOBS]
        serving.run(watch.run())
        await watch.synced.wait()
        async with asyncio.timeout(60):
            while {name for (_, name), _ in observer.jobs.items()} != {"b"}:
                await asyncio.sleep(0.01)

    play(story, script)


class TwoNamespaces:
    """Two namespaces without objects; requests about those in `lost` are refused."""

    def __init__(self, lost: set[str], refused_resource: str = "") -> None:
        self.lost = lost
        self.refused_resource = refused_resource
        self.attended = list[str | None]()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        is_lost = any(f"/namespaces/{namespace}/" in request.path for namespace in self.lost)
        if is_lost or request.path.endswith(f"/{self.refused_resource}"):
            refused = {"kind": "Status", "code": 403, "reason": "Forbidden", "message": "pods is forbidden"}
            return web.json_response(refused, status=403)
        if "watch" in request.query:
            await asyncio.sleep(0.1)
        return web.json_response({"metadata": {"resourceVersion": "5"}, "items": []})

    async def watch(self, story: Any) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        async with TestServer(app) as server:
            url = str(server.make_url("")).rstrip("/")
            client = ApiClient(Connection(Configuration(host=url)), concurrency=16)
            watches = reflectors(
                client, Observer((), lambda _: None), ("team-a", "team-b"), watch_nodes=False, watch_profiles=True
            )
            for watch in watches:
                watch._reconnect_seconds = 0.01
            attendance = Attendance(watches, self.attended.append)
            tasks = [asyncio.create_task(watch.run()) for watch in watches]
            async with asyncio.timeout(240):
                await story(watches, attendance)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await client.close()


def test_a_namespace_that_cannot_be_watched_stops_no_other() -> None:
    async def story(watches: list[Reflector], attendance: Attendance) -> None:
        for watch in watches:
            await watch.settled.wait()
        assert (attendance.includes("team-a"), attendance.includes("team-b")) == (True, False)
        health = Health(stale_watch_seconds=600.0)
        health.watching(watches)
        for watch in watches:
            if watch.namespace == "team-b":
                watch._heard_at -= 700.0
        assert health.problem() is None
        WATCH_AGE_SECONDS.clear()  # its functions would outlive the test
        for attended in (True, False, True):
            cluster.lost = set() if attended else {"team-b"}
            while attendance.includes("team-b") != attended or not attendance.includes("team-a"):
                await asyncio.sleep(0.01)

    cluster = TwoNamespaces({"team-b"})
    asyncio.run(cluster.watch(story))
    assert cluster.attended == ["team-a", "team-b", "team-b"]
