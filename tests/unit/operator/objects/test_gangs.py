"""Fields of a job's pods that Kueue and Volcano read."""

from __future__ import annotations

import re

import pytest

from rljob_operator.objects.invalid_template import InvalidTemplate
from tests.unit.operator.objects.builders import Object, job, objects, of_kind, pod_of

TWO_WORKERS: Object = {"policy": {"replicas": 2, "gpusPerReplica": 4}}


def test_without_a_gang_scheduler_the_pods_are_plain() -> None:
    for pod in objects(job(**TWO_WORKERS)).pods:
        assert pod["spec"].keys().isdisjoint({"schedulerName", "schedulingGates"})
        assert not any("kueue" in label for label in pod["metadata"]["labels"])


def test_kueue_finds_one_group_of_all_pods_at_its_gate() -> None:
    built = objects(job(queueName="gpus", **TWO_WORKERS), gang="Kueue", attempt=3)
    for pod in built.pods:
        labels, annotations = pod["metadata"]["labels"], pod["metadata"]["annotations"]
        assert labels["kueue.x-k8s.io/queue-name"] == "gpus"
        assert labels["kueue.x-k8s.io/pod-group-name"] == "sums-rljob-3"
        assert annotations["kueue.x-k8s.io/pod-group-total-count"] == "3"
        assert annotations["kueue.x-k8s.io/retriable-in-group"] == "false"
        assert pod["spec"]["schedulingGates"] == [{"name": "kueue.x-k8s.io/admission"}]


APART: Object = {
    "topology": "Disaggregated",
    "policy": {"replicas": 2, "gpusPerReplica": 4},
    "rollout": {"replicas": 3, "gpusPerReplica": 2},
}


def test_a_group_of_kueue_includes_rollout_pods() -> None:
    built = objects(job(queueName="gpus", **APART), gang="Kueue")
    assert len(built.pods) == 6
    for pod in built.pods:
        assert pod["metadata"]["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "6"
        assert pod["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"] == "sums-rljob-1"


def test_a_group_of_volcano_includes_rollout_pods_and_their_gpus() -> None:
    built = objects(job(**APART), gang="Volcano")
    group = of_kind("PodGroup", built)["spec"]
    assert (group["minMember"], group["minResources"]["nvidia.com/gpu"]) == (6, "14")
    assert {pod["spec"]["schedulerName"] for pod in built.pods} == {"volcano"}


def test_another_trainers_group_has_no_controller() -> None:
    built = objects(job(queueName="gpus", trainer={"image": "verl:1"}, **TWO_WORKERS), gang="Kueue")
    counts = {pod["metadata"]["annotations"]["kueue.x-k8s.io/pod-group-total-count"] for pod in built.pods}
    assert counts == {"2"}


def test_what_the_job_tells_kueue_is_passed_on() -> None:
    metadata = {"labels": {"kueue.x-k8s.io/priority-class": "high", "team": "rl"}}
    labels = pod_of(objects(job(metadata=metadata, queueName="gpus"), gang="Kueue"), "policy")["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/priority-class"] == "high"
    assert "team" not in labels


def test_a_users_own_gate_stays() -> None:
    template = {"spec": {"schedulingGates": [{"name": "mine"}, {"name": "kueue.x-k8s.io/admission"}]}}
    pod = pod_of(objects(job(queueName="q", policy={"template": template}), gang="Kueue"), "policy")
    assert pod["spec"]["schedulingGates"] == [{"name": "mine"}, {"name": "kueue.x-k8s.io/admission"}]


def test_volcano_finds_a_group_that_needs_all_pods_at_once() -> None:
    built = objects(job(**TWO_WORKERS), gang="Volcano")
    group = of_kind("PodGroup", built)
    assert group["apiVersion"] == "scheduling.volcano.sh/v1beta1"
    assert group["spec"] == {
        "minMember": 3,
        "minResources": {"cpu": "8500m", "memory": str((2 + 2 * 16) << 30), "nvidia.com/gpu": "8"},
    }
    for pod in built.pods:
        assert pod["spec"]["schedulerName"] == "volcano"
        assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == group["metadata"]["name"]


def test_queue_and_priority_of_a_volcano_group_come_from_the_job() -> None:
    metadata = {"annotations": {"scheduling.volcano.sh/queue-name": "research"}}
    policy = {"template": {"spec": {"priorityClassName": "high"}}}
    spec = of_kind("PodGroup", objects(job(metadata=metadata, policy=policy), gang="Volcano"))["spec"]
    assert (spec["queue"], spec["priorityClassName"]) == ("research", "high")


def test_sidecars_count_towards_what_a_group_needs() -> None:
    sidecar = {"name": "logs", "resources": {"limits": {"cpu": "250m"}}}
    policy = {"gpusPerReplica": 0, "template": {"spec": {"containers": [sidecar]}}}
    spec = of_kind("PodGroup", objects(job(policy=policy), gang="Volcano"))["spec"]
    assert spec["minResources"]["cpu"] == "1750m"


@pytest.mark.parametrize("quantity", ["lots", "1e999999", "1e9999999", "9" * 200_000])
@pytest.mark.parametrize("gang", ["Native", "Volcano"])
def test_anything_but_a_quantity_is_refused_by_its_field(quantity: str, gang: str) -> None:
    policy = {"template": {"spec": {"containers": [{"resources": {"requests": {"memory": quantity}}}]}}}
    path = r"spec.policy.template.spec.containers\[0\].resources.requests\['memory'\]"
    with pytest.raises(InvalidTemplate, match=f"{path}: expected a quantity such as .* found '{quantity[:9]}"):
        objects(job(policy=policy), gang=gang)


DIVISOR = {"name": "A", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1e9999999"}}}
CLAIM = {"volumeClaimTemplate": {"spec": {"resources": {"requests": {"storage": "1e9999999"}}}}}


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "1e9999999"}}]}, "emptyDir.sizeLimit"),
        ({"volumes": [{"name": "scratch", "ephemeral": CLAIM}]}, "spec.resources.requests['storage']"),
        ({"containers": [{"env": [DIVISOR]}]}, "valueFrom.resourceFieldRef.divisor"),
        ({"initContainers": [{"name": "a", "resources": {"limits": {"cpu": "1e999999"}}}]}, "resources.limits['cpu']"),
        ({"resources": {"limits": {"cpu": "1e999999"}}}, "template.spec.resources.limits['cpu']"),
        ({"overhead": {"cpu": "1e999999"}}, "template.spec.overhead['cpu']"),
    ],
)
def test_a_quantity_out_of_range_is_refused_wherever_a_pod_has_one(spec: Object, field: str) -> None:
    with pytest.raises(InvalidTemplate, match=re.escape(f"{field}: expected a quantity")):
        objects(job(policy={"template": {"spec": spec}}))


SPREAD: Object = {
    "topologyKey": "zone",
    "whenUnsatisfiable": "DoNotSchedule",
    "labelSelector": {"matchLabels": {"resources": "many", "limits": "none"}},
}


def test_texts_that_are_no_quantities_may_have_any_value() -> None:
    spec = {
        "nodeSelector": {"sizeLimit": "large"},
        "topologySpreadConstraints": [SPREAD],
        "volumes": [{"name": "a", "csi": {"driver": "d", "volumeAttributes": {"sizeLimit": "none"}}}],
    }
    assert pod_of(objects(job(policy={"template": {"spec": spec}})), "policy")["spec"]["nodeSelector"]
