"""The objects beside the pods."""

from __future__ import annotations

import json
import re

import pytest

from rljob_api.names import MAX_JOB_NAME_LENGTH
from rljob_operator import names
from rljob_operator.objects.metadata import is_shared
from rljob_operator.objects.pod_layout import PodLayout
from rljob_operator.objects.supporting_objects import latest_changes
from tests.unit.operator.objects.builders import (
    CHANGE,
    DISAGGREGATED,
    NAMESPACE,
    UID,
    Object,
    job,
    mounts_of,
    objects,
    of_kind,
    pod_of,
    settings,
)

WITH_VOLUME: Object = {"checkpoint": {"volume": {"persistentVolumeClaim": {"claimName": "mine"}}}}


def kinds(manifests: tuple[Object, ...]) -> list[str]:
    return [manifest["kind"] for manifest in manifests]


def test_a_plain_job_needs_eight_objects_beside_its_pods() -> None:
    built = objects(job(**WITH_VOLUME))
    assert kinds(built.apply) == ["ConfigMap", "Service", "ServiceAccount", "Role", "RoleBinding", "NetworkPolicy"]
    assert kinds(built.create) == ["Secret", "StepReport"]


def test_a_job_without_a_volume_gets_a_claim() -> None:
    assert kinds(objects(job()).create) == ["Secret", "StepReport", "PersistentVolumeClaim"]


def test_another_trainer_needs_no_token_no_account_and_no_report() -> None:
    built = objects(job(trainer={"image": "verl:1"}, **WITH_VOLUME))
    assert (kinds(built.apply), kinds(built.create)) == (["ConfigMap", "Service", "NetworkPolicy"], [])


def test_everything_goes_with_the_job_and_can_be_found_by_it() -> None:
    built = objects(job(), settings(), gang="Volcano")
    for manifest in (*built.apply, *built.create):
        (owner,) = manifest["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == (UID, True, True)
        assert manifest["metadata"]["namespace"] == NAMESPACE
        assert manifest["metadata"]["labels"]["rljob.dev/job-uid"] == UID


def test_the_controller_may_write_its_report_and_nothing_else() -> None:
    built = objects(job())
    assert of_kind("Role", built)["rules"] == [
        {
            "apiGroups": ["rljob.dev"],
            "resources": ["stepreports/status"],
            "resourceNames": ["sums"],
            "verbs": ["patch"],
        },
    ]
    binding = of_kind("RoleBinding", built)
    assert binding["roleRef"]["name"] == of_kind("Role", built)["metadata"]["name"]
    (subject,) = binding["subjects"]
    assert subject["name"] == pod_of(built, "controller")["spec"]["serviceAccountName"]
    assert subject["name"] == of_kind("ServiceAccount", built)["metadata"]["name"]
    assert of_kind("StepReport", built)["metadata"]["name"] == "sums"


def test_jobs_of_a_namespace_can_share_one_account() -> None:
    first, second = (objects(job(name), settings(shared_account=True), uid=name) for name in ("a", "b"))
    shared = [[manifest for manifest in built.apply if is_shared(manifest)] for built in (first, second)]
    assert shared[0] == shared[1]
    assert kinds(tuple(shared[0])) == ["ServiceAccount", "Role", "RoleBinding"]
    assert {manifest["metadata"]["name"] for manifest in shared[0]} == {"rljob-controllers"}
    assert not any("ownerReferences" in manifest["metadata"] for manifest in shared[0]), "it outlives each job"
    assert of_kind("Role", first)["rules"] == [
        {"apiGroups": ["rljob.dev"], "resources": ["stepreports/status"], "verbs": ["patch"]}
    ]
    assert pod_of(first, "controller")["spec"]["serviceAccountName"] == "rljob-controllers"


def test_the_ray_head_has_an_address_before_it_is_ready() -> None:
    built = objects(job())
    service = of_kind("Service", built)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    selector = service["spec"]["selector"].items()
    assert selector <= pod_of(built, "controller")["metadata"]["labels"].items()
    assert not selector <= pod_of(built, "policy")["metadata"]["labels"].items()
    assert [port["port"] for port in service["spec"]["ports"]] == [6379]


def test_the_token_is_the_one_that_was_given() -> None:
    secret = of_kind("Secret", objects(job(), ray_token="s3cret"))
    assert secret["stringData"] == {"token": "s3cret"}
    assert secret["immutable"] is True


@pytest.mark.parametrize(
    ("checkpoint", "installation", "size", "storage_class"),
    [
        ({}, {}, "50Gi", None),
        ({}, {"checkpoint_claim_bytes": 10 << 30, "checkpoint_storage_class": "nfs"}, "10Gi", "nfs"),
        ({"size": "200Gi", "storageClassName": "fast"}, {"checkpoint_storage_class": "nfs"}, "200Gi", "fast"),
    ],
)
def test_the_claim_is_what_the_job_says_or_else_the_installation(
    checkpoint: Object, installation: Object, size: str, storage_class: str | None
) -> None:
    built = objects(job(checkpoint=checkpoint), settings(**installation))
    spec = of_kind("PersistentVolumeClaim", built)["spec"]
    assert spec["accessModes"] == ["ReadWriteMany"]
    assert spec["resources"]["requests"]["storage"] == size
    assert spec.get("storageClassName") == storage_class


def test_a_retained_claim_has_no_owner_and_is_labelled() -> None:
    metadata = of_kind("PersistentVolumeClaim", objects(job(checkpoint={"retain": True})))["metadata"]
    assert "ownerReferences" not in metadata
    assert metadata["labels"]["rljob.dev/retained"] == "true"
    assert metadata["labels"]["rljob.dev/job-uid"]
    kept = of_kind("PersistentVolumeClaim", objects(job()))["metadata"]
    assert kept["ownerReferences"]
    assert "rljob.dev/retained" not in kept["labels"]


def test_a_volume_that_the_pods_cannot_share_is_told() -> None:
    (note,) = objects(job(checkpoint={"volume": {"emptyDir": {}}})).notices
    assert (note.type, note.reason) == ("Warning", "CheckpointVolumeNotShared")
    assert "create it again" in note.message, "checkpoint.volume cannot change"


@pytest.mark.parametrize(("spec", "pods"), [({}, 2), (DISAGGREGATED, 6)], ids=["one worker", "rollout pods"])
def test_with_a_network_policy_the_pods_talk_among_themselves(spec: Object, pods: int) -> None:
    proxy = {"to": [{"ipBlock": {"cidr": "10.0.0.9/32"}}], "ports": [{"port": 3128}]}
    built = objects(job(**spec), settings(api_server_ports=(16443,), network_policy_egress=[json.dumps(proxy)]))
    policy = of_kind("NetworkPolicy", built)["spec"]
    own_pods = {"podSelector": policy["podSelector"]}
    assert policy["ingress"] == [{"from": [own_pods]}]
    assert len(built.pods) == pods
    assert all(is_selected(pod, policy["podSelector"]) for pod in built.pods)
    others = objects(job("other", **spec), uid="another")
    assert not any(is_selected(pod, policy["podSelector"]) for pod in others.pods)

    assert policy["policyTypes"] == ["Ingress", "Egress"]
    to_own_pods, *egress = policy["egress"]
    assert to_own_pods == {"to": [own_pods]}
    assert {port["port"] for rule in egress for port in rule["ports"]} == {53, 5353, 443, 16443, 3128}
    assert egress[-1] == proxy
    assert "NetworkPolicy" not in kinds(objects(job(**spec), settings(network_policy=False)).apply)


def is_selected(pod: Object, selector: Object) -> bool:
    assert selector.keys() == {"matchLabels"}
    return bool(selector["matchLabels"].items() <= pod["metadata"]["labels"].items())


def test_the_names_of_the_longest_job_are_still_names() -> None:
    longest = "j" * MAX_JOB_NAME_LENGTH
    spec: Object = {
        "topology": "Disaggregated",
        "policy": {"replicas": 1024},
        "rollout": {"replicas": 2},
        "queueName": "q",
    }
    built = objects(job(longest, **spec), settings(), attempt=999_999, gang="Kueue")
    found = [manifest["metadata"]["name"] for manifest in (*built.apply, *built.create, *built.pods)]
    found += [label for pod in built.pods for label in pod["metadata"]["labels"].values()]
    found += [names.pod_group_name(longest), names.kueue_group_name(longest, 999_999)]
    assert max(map(len, found)) <= 63
    assert all(re.fullmatch("[a-z0-9]([-a-z0-9]*[a-z0-9])?", name) for name in found)


def test_pods_are_those_of_the_layout() -> None:
    spec: Object = {"topology": "Disaggregated", "policy": {"replicas": 2}, "rollout": {"replicas": 2}}
    this = job(**spec)
    expected = [name for name, _ in PodLayout.of(this.spec).pods("sums")]
    assert [pod["metadata"]["name"] for pod in objects(this).pods] == expected


def test_every_volume_that_is_mounted_is_there() -> None:
    for pod in objects(job(model={"uri": "oci://r/m:1"})).pods:
        assert mounts_of(pod).keys() == {volume["name"] for volume in pod["spec"]["volumes"]}


def test_a_config_map_has_room_for_the_latest_plan_changes() -> None:
    changes = [CHANGE.model_copy(update={"generation": generation}) for generation in range(2, 22)]
    assert latest_changes(changes) == changes
    diagnosis = CHANGE.diagnosis.model_copy(update={"message": "é" * 20_000})
    long = [change.model_copy(update={"diagnosis": diagnosis}) for change in changes]
    latest = latest_changes(long)
    assert latest == long[-len(latest) :]
    assert 6 * 40_000 <= sum(len(change.model_dump_json().encode()) for change in latest) <= 256 << 10
