"""The objects beside the pods."""

from __future__ import annotations

import re

import pytest

from rljob_api.names import MAX_JOB_NAME_LENGTH
from rljob_operator import names
from rljob_operator.objects.pod_layout import PodLayout
from tests.unit.operator.objects.builders import (
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


def test_a_plain_job_needs_seven_objects_beside_its_pods() -> None:
    built = objects(job(**WITH_VOLUME))
    assert kinds(built.apply) == ["ConfigMap", "Service", "ServiceAccount", "Role", "RoleBinding"]
    assert kinds(built.create) == ["Secret", "StepReport"]


def test_a_job_without_a_volume_gets_a_claim() -> None:
    assert kinds(objects(job()).create) == ["Secret", "StepReport", "PersistentVolumeClaim"]


def test_another_trainer_needs_no_token_no_account_and_no_report() -> None:
    built = objects(job(trainer={"image": "verl:1"}, **WITH_VOLUME))
    assert (kinds(built.apply), kinds(built.create)) == (["ConfigMap", "Service"], [])


def test_everything_goes_with_the_job_and_can_be_found_by_it() -> None:
    built = objects(job(), settings(network_policy=True), gang="Volcano")
    for manifest in (*built.apply, *built.create):
        (owner,) = manifest["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == (UID, True, True)
        assert manifest["metadata"]["namespace"] == NAMESPACE
        assert manifest["metadata"]["labels"]["rljob.dev/job-uid"] == UID


def test_the_controller_may_read_its_job_read_and_patch_its_report_and_nothing_else() -> None:
    built = objects(job())
    assert of_kind("Role", built)["rules"] == [
        {
            "apiGroups": ["rljob.dev"],
            "resources": ["stepreports"],
            "resourceNames": ["sums"],
            "verbs": ["get", "patch"],
        },
        {"apiGroups": ["rljob.dev"], "resources": ["rljobs"], "resourceNames": ["sums"], "verbs": ["get"]},
    ]
    binding = of_kind("RoleBinding", built)
    assert binding["roleRef"]["name"] == of_kind("Role", built)["metadata"]["name"]
    (subject,) = binding["subjects"]
    assert subject["name"] == pod_of(built, "controller")["spec"]["serviceAccountName"]
    assert subject["name"] == of_kind("ServiceAccount", built)["metadata"]["name"]
    assert of_kind("StepReport", built)["metadata"]["name"] == "sums"


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


def test_a_volume_that_the_pods_cannot_share_is_told() -> None:
    (note,) = objects(job(checkpoint={"volume": {"emptyDir": {}}})).notices
    assert (note.type, note.reason) == ("Warning", "CheckpointVolumeNotShared")


def test_with_a_network_policy_the_pods_talk_among_themselves() -> None:
    built = objects(job(), settings(network_policy=True))
    spec = of_kind("NetworkPolicy", built)["spec"]
    (ingress,) = spec["ingress"]
    (peer,) = ingress["from"]
    for pod in built.pods:
        assert spec["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert peer["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert {port["port"] for rule in spec["egress"] for port in rule.get("ports", [])} == {53, 443, 6443}
    assert "NetworkPolicy" not in kinds(objects(job()).apply)


def test_the_names_of_the_longest_job_are_still_names() -> None:
    longest = "j" * MAX_JOB_NAME_LENGTH
    spec: Object = {
        "topology": "Disaggregated",
        "policy": {"replicas": 1024},
        "rollout": {"replicas": 2},
        "queueName": "q",
    }
    built = objects(job(longest, **spec), settings(network_policy=True), attempt=999_999, gang="Kueue")
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
