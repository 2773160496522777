"""Observations of one job from the caches, and the keys that changes wake."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import pytest

from rljob_operator.kube.watch import Key
from rljob_operator.metrics import JOBS
from rljob_operator.observe import job_facts
from rljob_operator.observe.node_facts import NodeFact, node_fact
from rljob_operator.observe.observer import CHECK_SECONDS, Observer
from rljob_operator.observe.packed import unpack
from rljob_operator.reconcile.observed import Observed, ObservedNode
from tests.unit.operator.observe.objects import UID, Object, job, node, pod, step_report

SUMS: Key = ("research", "sums")
GPUS = ("nvidia.com/gpu", "amd.com/gpu")


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
    return Observer(GPUS, woken.append)


def seen(observer: Observer) -> Observed:
    observation = observer.observe(SUMS)
    assert observation is not None
    return observation.observed


def test_nothing_is_known_of_a_job_that_is_not_there(observer: Observer) -> None:
    observer.pods.put(pod())
    assert observer.observe(SUMS) is None


def test_a_job_is_put_together_from_all_caches(observer: Observer) -> None:
    observer.jobs.put(job(status={"step": 3}))
    observer.pods.put(pod())
    observer.step_reports.put(step_report(step=4))
    observer.nodes.put(node("gpu-node", gpus="8"))
    observer.set_api_groups(frozenset({"apps", "kueue.x-k8s.io"}))
    observation = observer.observe(SUMS)
    assert observation is not None
    assert (observation.resource_version, observation.status) == ("10", {"step": 3})
    job_seen = observation.observed
    assert job_seen.job is not None
    assert [found.name for found in job_seen.pods] == ["sums-controller"]
    assert job_seen.step_report is not None
    assert job_seen.step_report.step == 4
    assert job_seen.nodes == (ObservedNode("gpu-node", gpus=8, usable=True),)
    assert (job_seen.kueue_installed, job_seen.volcano_installed) == (True, False)
    assert job_seen.fresh_token != seen(observer).fresh_token


def test_pods_that_are_not_the_jobs_own_are_foreign(observer: Observer) -> None:
    observer.jobs.put(job())
    observer.pods.put(pod("a", ownerReferences=[]))
    observer.pods.put(pod("b", ownerReferences=[{"uid": "of-a-deleted-job", "controller": True}]))
    observer.pods.put(pod("c", labels={"rljob.dev/job-name": "sums"}))
    assert seen(observer).foreign_pods == ("a", "b", "c")
    assert seen(observer).pods == ()


LEAVING: Object = {"deletionTimestamp": "2026-01-02T04:00:00Z"}


def test_a_leaving_pod_of_a_deleted_job_is_waited_for(observer: Observer) -> None:
    observer.jobs.put(job())
    observer.pods.put(pod("a", ownerReferences=[{"uid": "of-a-deleted-job", "controller": True}], **LEAVING))
    assert seen(observer).foreign_pods == ()
    assert "pod a of a deleted job of this name" in (seen(observer).left_behind or "")


def test_workloads_of_a_job_that_is_gone_release_its_queued_pods(observer: Observer) -> None:
    gated: Object = {"spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}}
    observer.pods.put(pod(**gated, **LEAVING))
    assert observer.orphaned_workloads(SUMS) == (), "there is no Kueue"
    observer.set_api_groups(frozenset({"kueue.x-k8s.io"}))
    assert observer.orphaned_workloads(SUMS) == ("sums-rljob-1",)
    observer.pods.put(pod(version=21, **LEAVING))
    assert observer.orphaned_workloads(SUMS) == (), "it was admitted"


def test_a_job_of_another_manager_is_in_no_metric_and_waits_for_no_node(observer: Observer, woken: Woken) -> None:
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


def test_a_pod_that_is_gone_is_not_seen(observer: Observer) -> None:
    observer.jobs.put(job())
    observer.pods.put(pod(version=20))
    observer.pods.remove(pod(version=21))
    assert seen(observer).pods == ()


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
    observer.jobs.put(job("placed", status={"conditions": [{"type": "Scheduled", "status": "True"}]}))
    woken.clear()
    observer.nodes.put(node())
    assert woken.taken() == set(), "they are woken in portions"
    assert observer.unplaced.next_portion() == [SUMS]
    observer.nodes.put(node(version=31, annotations={"heartbeat": "2"}))
    observer.nodes.put(node(version=32, spec={"unschedulable": True}))
    assert observer.unplaced.next_portion() == []
    assert seen(observer).nodes == (ObservedNode("cpu-node", gpus=0, usable=False),)


def test_running_jobs_are_known(observer: Observer) -> None:
    observer.jobs.put(job())
    assert not observer.runs(SUMS)
    observer.jobs.put(job(version=11, status={"conditions": [{"type": "Scheduled", "status": "True"}]}))
    assert observer.runs(SUMS)
    observer.jobs.put(job(version=12, status={"display": {"phase": "Recovering"}}))
    assert observer.runs(SUMS)
    observer.jobs.put(job(version=13, status={"display": {"phase": "Complete"}}))
    assert not observer.runs(SUMS)


def test_a_reconcile_without_a_write_parses_the_job_once(observer: Observer, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []

    def recorded(packed: bytes) -> bytes:
        parsed.append(packed)
        return unpack(packed)

    monkeypatch.setattr(job_facts, "unpack", recorded)
    observer.jobs.put(job(status={"step": 3}))
    observation = observer.observe(SUMS)
    assert observation is not None
    assert (len(parsed), observation.observed.name, observation.observed.job is None) == (0, "sums", False)
    assert len(parsed) == 1
    assert observation.status == observation.status == {"step": 3}
    assert len(parsed) == 2


def test_setbacks_last_until_everything_is_made_or_the_job_is_another(observer: Observer) -> None:
    observer.jobs.put(job())
    observer.refusals(SUMS).refused = "exceeded quota"
    observer.refusals(SUMS).name_taken("sums-controller")
    observer.refusals(SUMS).namespace_terminating = True
    found = seen(observer)
    assert (found.refused, found.foreign_pods, found.namespace_terminating) == (
        "exceeded quota",
        ("sums-controller",),
        True,
    )
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


LOST_AT = "2026-01-02T04:00:00+00:00"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (node(gpus="8"), NodeFact(ObservedNode("cpu-node", 8, usable=True), labelled=False)),
        (node(gpus="0"), NodeFact(ObservedNode("cpu-node", 0, usable=True), labelled=False)),
        (node(gpus="1k"), NodeFact(ObservedNode("cpu-node", 1000, usable=True), labelled=False)),
        (
            node(labels={"rljob.dev/has-gpus": "true"}),
            NodeFact(ObservedNode("cpu-node", 0, usable=True), labelled=True),
        ),
        (
            node(status={"allocatable": {"nvidia.com/gpu": "4", "amd.com/gpu": "2"}}),
            NodeFact(ObservedNode("cpu-node", 6, usable=False), labelled=False),
        ),
        (
            node(status={"declaredFeatures": ["RestartAllContainersOnContainerExits"]}),
            NodeFact(ObservedNode("cpu-node", 0, usable=False, restarts_in_place=True), labelled=False),
        ),
        (
            node(status={"conditions": [{"type": "Ready", "status": "Unknown", "lastTransitionTime": LOST_AT}]}),
            NodeFact(
                ObservedNode("cpu-node", 0, usable=False, unreachable_since=datetime.fromisoformat(LOST_AT)),
                labelled=False,
            ),
        ),
        (
            node(status={"conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": LOST_AT}]}),
            NodeFact(ObservedNode("cpu-node", 0, usable=False), labelled=False),
        ),
        (
            node(spec={"taints": [{"key": "a", "effect": "NoSchedule"}]}),
            NodeFact(ObservedNode("cpu-node", 0, usable=True, tainted=True), labelled=False),
        ),
        (
            node(spec={"taints": [{"key": "a", "effect": "PreferNoSchedule"}]}),
            NodeFact(ObservedNode("cpu-node", 0, usable=True), labelled=False),
        ),
    ],
)
def test_what_is_read_from_a_node(given: dict[str, object], expected: NodeFact) -> None:
    assert node_fact(given, GPUS) == expected


def test_lookups_of_objects_are_spread_and_follow_a_deleted_report() -> None:
    key = ("research", "sums")
    first = set()
    for _ in range(5):
        observer = Observer((), lambda _key: None)
        observer.jobs.put(job())
        seen = observer.observe(key)
        assert seen is not None
        assert 0 < (seen.observed.objects_check_seconds or 0) <= CHECK_SECONDS
        first.add(seen.observed.objects_check_seconds)
    assert len(first) == 5
    observer.step_reports.put(step_report(step=1))
    observer.step_reports.remove(step_report(version=41))
    deleted = observer.observe(key)
    assert deleted is not None
    assert deleted.observed.objects_check_seconds == 0
    look_up(observer, key)
    checked = observer.observe(key)
    assert checked is not None
    assert (checked.observed.objects_check_seconds or 0) > CHECK_SECONDS / 2


def test_a_report_deleted_during_a_lookup_is_looked_up_again() -> None:
    key = ("research", "sums")
    observer = Observer((), lambda _key: None)
    observer.jobs.put(job())
    observer.step_reports.put(step_report(step=1))
    look_up(observer, key, meanwhile=lambda: observer.step_reports.remove(step_report(version=41)))
    again = observer.observe(key)
    assert again is not None
    assert again.observed.objects_check_seconds == 0


def look_up(observer: Observer, key: Key, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Mark a successful lookup, as the reconcile loop does."""
    observer.objects_checked(key, failed=True)
    meanwhile()
    observer.objects_checked(key)
