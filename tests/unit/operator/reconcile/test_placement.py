"""Placement of pods: nodes, gangs, refusals, release of partly placed jobs, pods that cannot start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest

from rljob_api.conditions import ConditionType
from rljob_operator.reconcile.desired import Desired
from rljob_operator.reconcile.observed import ObservedNode
from rljob_testing.simulated_cluster import (
    CONTROLLER,
    CPU_NODE,
    GPU_NODE,
    POLICY_0,
    POLICY_1,
    SETTINGS,
    SimulatedCluster,
    created_job,
    job_spec,
    new_job,
    running_job,
)

NO_GPUS_LEFT = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
KUEUE, VOLCANO = {"kueue_installed": True}, {"volcano_installed": True}
GANGS: list[Any] = [({}, {}), ({"gang": "Volcano"}, VOLCANO), ({"queueName": "team"}, KUEUE)]
OTHER_TRAINER = {"trainer": {"image": "registry.example/verl:1"}}


def created(spec: dict[str, Any], facts: dict[str, Any]) -> SimulatedCluster:
    return created_job(**spec, facts=dict(facts))


# --- the node of the controller ---


TAINTED_CPU_NODE = ObservedNode("cpu-pool", gpus=0, usable=True, tainted=True)
TAINTED_GPU_NODE = replace(GPU_NODE, tainted=True)
TOLERATING = {"template": {"spec": {"tolerations": [{"key": "cpu-pool", "operator": "Exists"}]}}}


@pytest.mark.parametrize(
    ("nodes", "controller", "required", "tolerates"),
    [
        ((CPU_NODE, GPU_NODE), {}, True, False),
        ((GPU_NODE,), {}, False, False),
        ((), {}, False, False),  # such as a cluster of GKE Autopilot, which refuses the toleration
        ((ObservedNode("cordoned", gpus=0, usable=False), GPU_NODE), {}, False, False),
        ((TAINTED_CPU_NODE, GPU_NODE), {}, False, False),
        ((TAINTED_CPU_NODE, GPU_NODE), TOLERATING, True, True),
        ((TAINTED_GPU_NODE,), {}, False, True),
        ((replace(TAINTED_GPU_NODE, usable=False),), {}, False, False),
        ((CPU_NODE, TAINTED_GPU_NODE), {}, True, False),
        (None, {}, False, True),
    ],
)
def test_the_controller_requires_a_gpu_free_node_or_tolerates_gpu_nodes(
    nodes: tuple[ObservedNode, ...] | None, controller: dict[str, Any], required: bool, tolerates: bool
) -> None:
    """`nodes`: None if the operator does not watch them."""
    settings = SETTINGS.model_copy(update={"watch_nodes": nodes is not None})
    cluster = new_job(controller=controller, nodes=nodes or (), settings=settings)
    cluster.round()
    [pod] = [manifest for manifest in cluster.round().create if manifest["metadata"]["name"] == CONTROLLER]
    affinity = pod["spec"]["affinity"]["nodeAffinity"]
    assert ("requiredDuringSchedulingIgnoredDuringExecution" in affinity) == required
    assert bool(pod["spec"].get("tolerations")) == tolerates


def test_a_job_that_requires_a_gpu_free_node_waits_for_one() -> None:
    cluster = created_job(controller={"requireGpuFreeNode": True}, nodes=(GPU_NODE,))
    cluster.expect(wait=60, scheduled=(False, "NoGpuFreeNode"), pods=set())
    cluster.nodes = (GPU_NODE, CPU_NODE)
    cluster.run().expect(phase="Running")


def test_a_controller_on_a_gpu_node_is_reported() -> None:
    cluster = created_job(nodes=(GPU_NODE,)).place(node="gpu-node").start().ready()
    assert cluster.settled(scheduled=(True, "ControllerOnGpuNode")).events == ["ControllerOnGpuNode"]


# --- pods that are not placed ---

TOO_MANY = "no node has 16 nvidia.com/gpu: the largest, gpu-node, has 8; add a node, or delete the job"
TOO_MANY_IN_ALL = "the job requests 16 nvidia.com/gpu, but all usable nodes together have 8"
ROLLOUT: dict[str, Any] = {"topology": "Disaggregated", "rollout": {"gpusPerReplica": 16}}


@pytest.mark.parametrize(
    ("spec", "pods", "text", "message"),
    [
        (
            {"policy": {"gpusPerReplica": 16}},
            [POLICY_0],
            NO_GPUS_LEFT,
            (TOO_MANY, "with a lower policy.gpusPerReplica"),
        ),
        (ROLLOUT, ["demo-rollout-0"], NO_GPUS_LEFT, (TOO_MANY, "with a lower rollout.gpusPerReplica")),
        ({"policy": {"replicas": 2, "gpusPerReplica": 8}}, [POLICY_1], NO_GPUS_LEFT, TOO_MANY_IN_ALL),
        ({}, [POLICY_0, POLICY_1], "2 Insufficient memory.", "pod demo-policy-0 (and 1 more): 2 Insufficient memory."),
    ],
)
def test_an_unplaced_pod_is_explained(spec: dict[str, Any], pods: list[str], text: str, message: Any) -> None:
    cluster = created_job(**spec).unschedulable(text, *pods)
    cluster.settled(scheduled=(False, "Unschedulable"), scheduled_contains=message)


def test_a_partly_placed_job_releases_all_its_pods_and_retries_later() -> None:
    cluster = created_job().place(CONTROLLER, POLICY_0).unschedulable(NO_GPUS_LEFT, POLICY_1).settled(wait=600)
    waits = []
    for retry in range(6):
        placed = 1 if retry else 2
        cluster.tick(600).stop().expect(pods=set(), scheduled=(False, "PlacementTimedOut"))
        cluster.expect(scheduled_contains=f"only {placed} of 3 pods were scheduled")
        waits.append(cluster.last.requeue_after_seconds or 0)
        cluster.tick(waits[-1]).settled().place(CONTROLLER)
    assert 60 <= waits[0] <= 90
    assert [wait / waits[0] for wait in waits] == pytest.approx([1, 2, 4, 8, 10, 10], abs=0.05)
    cluster.run().expect(phase="Running", restarts=0, placement_retries=6)
    assert [attempt.number for attempt in cluster.stored.attempts] == [7], "an attempt that never ran leaves no record"


def test_the_placement_timeout_starts_with_the_last_created_or_placed_pod() -> None:
    cluster = created_job().tick(5000).place(CONTROLLER)
    cluster.settled(pods={CONTROLLER, POLICY_0, POLICY_1}, deleting=set())
    cluster.vanish(POLICY_0).vanish(POLICY_1).tick(1000)  # the operator died before it created them
    cluster.settled(wait=600, pods={CONTROLLER, POLICY_0, POLICY_1}).tick(600).settled()
    assert cluster.pods[CONTROLLER].deleting


@pytest.mark.parametrize(
    ("spec", "facts", "edit", "released"),
    [
        ({"gang": "Disabled"}, {}, {}, False),
        ({"gang": "Volcano"}, VOLCANO, {}, False),
        ({}, VOLCANO, {}, False),
        ({"queueName": "team"}, KUEUE, {}, False),
        ({"queueName": "team"}, KUEUE, {"queueName": None}, False),
        ({}, KUEUE, {"queueName": "team"}, True),
        ({}, KUEUE, {"gang": "Volcano"}, True),
    ],
)
def test_partly_placed_pods_of_another_gang_scheduler_stay(
    spec: dict[str, Any], facts: dict[str, Any], edit: dict[str, Any], released: bool
) -> None:
    """The pods belong to the scheduler that they were created for, also after an edit."""
    cluster = created(spec, facts).place(CONTROLLER).start(CONTROLLER).change_spec(**edit).settled()
    cluster.tick(6000).settled(reason="PlacementTimedOut" if released else None)
    assert cluster.pods[CONTROLLER].deleting == released


@pytest.mark.parametrize("spec", [{"gang": "Volcano"}, {"queueName": "team"}])
def test_a_job_waits_for_a_missing_gang_scheduler(spec: dict[str, Any]) -> None:
    cluster = created_job(**spec).expect(scheduled=(False, "GangSchedulerMissing"), pods=set())
    cluster.observes(**VOLCANO, **KUEUE).run().expect(phase="Running")


def test_pods_held_by_kueue_wait_for_their_queue() -> None:
    created({"queueName": "team"}, KUEUE).gate().settled(scheduled="WaitingForQueue", scheduled_contains="team")


QUEUE_LABEL = {"kueue.x-k8s.io/queue-name": "team"}


def first_pods(cluster: SimulatedCluster) -> list[dict[str, Any]]:
    desired = next(desired for _ in range(9) if (desired := cluster.round()).create)
    return [created for created in desired.create if created["kind"] == "Pod"]


def test_the_label_of_kueue_names_the_queue_of_a_job_without_queue_name() -> None:
    cluster = new_job()
    cluster.labels = QUEUE_LABEL
    message = "the label kueue.x-k8s.io/queue-name is team, but the cluster has no Kueue"
    cluster.settled(scheduled="GangSchedulerMissing", scheduled_contains=message)
    cluster.facts = dict(KUEUE)
    pods = first_pods(cluster)
    assert len(pods) == 3
    for pod in pods:
        assert QUEUE_LABEL.items() <= pod["metadata"]["labels"].items()
        assert pod["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"] == "demo-rljob-1"
        assert pod["spec"]["schedulingGates"] == [{"name": "kueue.x-k8s.io/admission"}]
    cluster.gate().settled(scheduled="WaitingForQueue", start_time=None)


@pytest.mark.parametrize("labels", [{}, QUEUE_LABEL])
def test_queue_name_precedes_the_label(labels: dict[str, str]) -> None:
    cluster = new_job(queueName="mine", facts=KUEUE)
    cluster.labels = labels
    assert {pod["metadata"]["labels"].get("kueue.x-k8s.io/queue-name") for pod in first_pods(cluster)} == {"mine"}


def test_an_empty_label_names_no_queue() -> None:
    cluster = new_job()
    cluster.labels = {"kueue.x-k8s.io/queue-name": ""}
    cluster.run().expect(phase="Running")


def test_a_job_with_the_label_that_asks_for_volcano_is_refused() -> None:
    """With queueName, the API server refuses the job."""
    cluster = new_job(gang="Volcano", facts=KUEUE | VOLCANO)
    cluster.labels = QUEUE_LABEL
    cluster.settled(pods=set(), stalled="InvalidSpec", stalled_contains="write gang: Auto, or remove the label")
    cluster.labels = {}
    cluster.run().expect(phase="Running")


# --- pods that are refused in part: those that exist are released, so that they block no other job ---


@pytest.mark.parametrize("are_placed", [False, True])
@pytest.mark.parametrize(("spec", "facts"), GANGS)
def test_pods_do_not_wait_forever_for_refused_pods(
    spec: dict[str, Any], facts: dict[str, Any], are_placed: bool
) -> None:
    cluster = created(spec, facts).vanish(POLICY_1)
    if are_placed:
        cluster.change_pod(CONTROLLER, gated=False).place(CONTROLLER).start(CONTROLLER)
    cluster.observes(**facts, refused="exceeded quota: gpus").settled(pods={CONTROLLER, POLICY_0}).tick(600)
    cause = "only 2 of 3 pods exist, so all are deleted: the API server refused: exceeded quota: gpus"
    cluster.stop().expect(pods=set(), scheduled=(False, "PlacementTimedOut"), scheduled_contains=cause)


def test_without_a_gang_pods_stay_though_others_are_refused() -> None:
    cluster = created_job(gang="Disabled").vanish(POLICY_1).observes(refused="exceeded quota: gpus")
    cluster.tick(6000).settled(deleting=set(), reason=None)


class JobInQuota(SimulatedCluster):
    """A job in a namespace with a quota of pods, which creates one pod in each round."""

    quota = 4
    created_in_round = False
    namespace: ClassVar[list[JobInQuota]] = []

    def _create_pod(self, manifest: dict[str, Any]) -> None:
        if manifest["metadata"]["name"] in self.pods or self.created_in_round:
            return
        if sum(len(job.pods) for job in self.namespace) >= self.quota:
            self.facts["refused"] = "exceeded quota: pods"
            return
        self.created_in_round = True
        self.facts.pop("refused", None)
        super()._create_pod(manifest)

    def round(self, *arguments: Any, **named: Any) -> Desired:
        self.created_in_round = False
        return super().round(*arguments, **named)


@pytest.mark.parametrize(("spec", "facts"), GANGS)
def test_two_jobs_that_each_have_half_of_a_quota_both_complete(spec: dict[str, Any], facts: dict[str, Any]) -> None:
    jobs = [JobInQuota(spec=job_spec(**spec), facts=dict(facts), uid=uid) for uid in ("first", "second")]
    JobInQuota.namespace = jobs
    for _ in range(4):
        for job in jobs:
            job.round()
    assert [len(job.pods) for job in jobs] == [2, 2]
    for _ in range(500):
        for job in jobs:
            job.round()
            job.finish_deletions()
            if len(job.pods) == 3 and not job.holds(ConditionType.COMPLETE):
                job.gate(False).run().end(CONTROLLER, 0).settled().vanish(CONTROLLER)
            job.tick(5)
    assert all(job.holds(ConditionType.COMPLETE) for job in jobs)


# --- pods that cannot start ---

NO_CLAIM = '0/2 nodes are available: persistentvolumeclaim "data" not found.'
NOT_FOUND = 'ErrImagePull: failed to pull image "nowhere/none:1": not found'
NO_SECRET = 'CreateContainerConfigError: secret "token" not found'
BAD_NAME = 'InvalidImageName: couldn\'t parse image name "UPPER": invalid reference'


@pytest.mark.parametrize("waiting", [NOT_FOUND, NO_SECRET])
def test_a_pod_that_cannot_start_is_reported_then_fails_the_job(waiting: str) -> None:
    cluster = created_job().place().start(CONTROLLER).change_pod(POLICY_0, waiting=waiting)
    cluster.round()
    cluster.expect(running="PodCannotStart", running_contains=f"pod demo-policy-0 cannot start: {waiting}")
    cluster.tick(1800).settled(failed="PodCannotStart", failed_contains=waiting)


def test_an_invalid_image_name_fails_the_job_at_once() -> None:
    cluster = created_job().place().change_pod(CONTROLLER, waiting=BAD_NAME)
    cluster.settled(phase="Failed", failed_contains="InvalidImageName")


def test_a_claim_that_does_not_exist_fails_the_job_after_the_timeout() -> None:
    cluster = created_job().unschedulable(NO_CLAIM, CONTROLLER, POLICY_0)
    cluster.settled(wait=1800, scheduled_contains=NO_CLAIM).tick(1800).settled(failed_contains=NO_CLAIM)


def test_pods_that_wait_for_room_or_are_unready_have_no_deadline() -> None:
    cluster = created_job()
    cluster.unschedulable("0/2 nodes are available: 2 Insufficient cpu.", *cluster.pods).settled()
    cluster.tick(1_000_000).settled(phase="Pending", deleting=set()).place().start(CONTROLLER)
    advice = "for images and volumes, see kubectl describe pod demo-policy-0"
    cluster.tick(60).settled(running_contains=("pod demo-policy-0 (and 1 more) has not started", advice))
    cluster.start().tick(100_000).settled(phase="Pending", deleting=set(), pods={CONTROLLER, POLICY_0, POLICY_1})


@pytest.mark.parametrize("spec", [{}, OTHER_TRAINER])
def test_an_outage_of_the_registry_after_progress_is_a_counted_restart(spec: dict[str, Any]) -> None:
    cluster = running_job(**spec)
    if not spec:
        cluster.reports(40)
    cluster.end(POLICY_0, 1).tick(20).stop().tick(400).settled().place()
    for name in cluster.pods:
        cluster.change_pod(name, waiting="ImagePullBackOff: registry: 503")
    cluster.tick(1801).settled(phase="Recovering", restarts=2, recovering_contains="ImagePullBackOff: registry: 503")
    assert cluster.stop().last.requeue_after_seconds, "the next attempt is delayed"
    cluster.next_attempt_runs().expect(phase="Running", number=3)
