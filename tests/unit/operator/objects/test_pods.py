"""Rules that hold for the objects of every kind of job."""

from __future__ import annotations

import re

import pytest

from rljob_api.attempt_settings import AttemptSettings
from rljob_api.metadata import MAX_JOB_NAME_LENGTH
from rljob_operator import names
from rljob_operator.objects.attempt import is_shared
from rljob_operator.objects.pod_layout import PodLayout, low_memory_limit, predicted_limit_bytes
from rljob_operator.objects.supporting_objects import latest_changes
from tests.unit.operator.objects.builders import (
    CHANGE,
    COMMON_LABELS,
    DISAGGREGATED,
    NAMESPACE,
    OTHER_TRAINER,
    PLAN,
    UID,
    Object,
    container_of,
    environment_of,
    job,
    mounts_of,
    objects,
    of_kind,
    pod_of,
    settings,
    volumes_of,
)
from tests.unit.operator.objects.pod_security import restricted_violations

JOBS: dict[str, Object] = {
    "of one worker": {},
    "without GPUs": {"policy": {"replicas": 2, "gpusPerReplica": 0}},
    "with rollouts of their own": DISAGGREGATED,
    "with a model in an image": {"model": {"uri": "oci://registry/models/m:1"}},
    "with a volume": {"checkpoint": {"volume": {"persistentVolumeClaim": {"claimName": "mine"}}}},
    "with files of the task": {"task": {"name": "digits", "files": {"configMap": "my-task"}}},
    "of another trainer": OTHER_TRAINER,
}


@pytest.mark.parametrize("run_as_user", [10001, 0])
@pytest.mark.parametrize("spec", JOBS.values(), ids=JOBS.keys())
def test_every_object_belongs_to_the_job_and_every_pod_is_restricted(spec: Object, run_as_user: int) -> None:
    given = job(**spec)
    before = given.model_dump_json()
    with_settings = settings(probe_image="registry/rljob/operator:1", run_as_user=run_as_user)
    built = objects(given, with_settings, plan=PLAN, gang="Volcano")
    assert objects(given, with_settings, plan=PLAN, gang="Volcano") == built
    assert given.model_dump_json() == before
    assert [manifest["kind"] for manifest in built.apply if is_shared(manifest)] == ["Service"]
    own = [manifest for manifest in (*built.apply, *built.create, *built.pods) if not is_shared(manifest)]
    for manifest in own:
        (owner,) = manifest["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"]) == ("RLJob", UID)
        assert owner["controller"] is owner["blockOwnerDeletion"] is True
        assert manifest["metadata"]["namespace"] == NAMESPACE
        labels = manifest["metadata"]["labels"]
        assert COMMON_LABELS.items() <= labels.items()
        assert labels["app.kubernetes.io/component"] == labels.get("rljob.dev/role", "job")
    for pod in built.pods:
        assert restricted_violations(pod) == []
        assert {mount["name"] for mount in container_of(pod)["volumeMounts"]} <= volumes_of(pod).keys()
        is_controller = pod["metadata"]["labels"]["rljob.dev/role"] == "controller"
        assert pod["spec"].get("serviceAccountName") == ("sums-rljob" if is_controller else None)
        assert pod["spec"]["automountServiceAccountToken"] is is_controller


def test_the_pods_are_those_of_the_layout_and_differ_in_name_and_index() -> None:
    of = job(**DISAGGREGATED)
    pods = objects(of).pods
    assert [pod["metadata"]["name"] for pod in pods] == [name for name, _ in PodLayout.of(of.spec).pods("sums")]
    last = pods[-1]
    assert last["metadata"]["name"] == last["spec"]["hostname"] == "sums-rollout-2"
    assert last["metadata"]["labels"]["rljob.dev/index"] == "2"
    assert container_of(last) == container_of(pod_of(objects(of), "rollout", 0))


def test_pods_of_another_attempt_differ_in_labels_alone() -> None:
    """A literal variable would make the specs of two attempts differ."""
    first, second = (objects(job(), number=number, plan=PLAN, restarts_in_place=True) for number in (1, 2))
    for before, after in zip(first.pods, second.pods, strict=True):
        assert before["spec"] == after["spec"]
        assert before["metadata"]["annotations"] == after["metadata"]["annotations"]
        assert before["metadata"]["name"] == after["metadata"]["name"]
    changed = objects(job(), number=2, plan=PLAN, restarts_in_place=False)
    digests = [pod["metadata"]["annotations"]["rljob.dev/spec-digest"] for pod in (*first.pods, *changed.pods)]
    assert len(set(digests)) == len(digests)


def test_pods_read_the_plan_and_its_changes_as_they_are() -> None:
    text = of_kind("ConfigMap", objects(job(), number=4, plan=PLAN, plan_changes=[CHANGE]))["data"]["attempt.json"]
    read = AttemptSettings.model_validate_json(text)
    assert (read.attempt, read.memory_plan, read.plan_changes) == (4, PLAN, [CHANGE])
    assert read.allocator_environments.keys() == {"policy", "rollout"}
    without = of_kind("ConfigMap", objects(job(), number=2))["data"]["attempt.json"]
    assert AttemptSettings.model_validate_json(without).plan_generation == 1


def test_a_config_map_has_room_for_the_latest_plan_changes() -> None:
    changes = [CHANGE.model_copy(update={"generation": generation}) for generation in range(2, 22)]
    assert latest_changes(changes) == changes
    diagnosis = CHANGE.diagnosis.model_copy(update={"message": "é" * 20_000})
    long = [change.model_copy(update={"diagnosis": diagnosis}) for change in changes]
    latest = latest_changes(long)
    assert latest == long[-len(latest) :]
    assert 6 * 40_000 <= sum(len(change.model_dump_json().encode()) for change in latest) <= 256 << 10


def test_jobs_of_a_namespace_can_share_one_account() -> None:
    first, second = (objects(job(name), settings(shared_account=True), uid=name) for name in ("a", "b"))
    shared = [[manifest for manifest in built.apply if is_shared(manifest)] for built in (first, second)]
    assert shared[0] == shared[1]
    assert [manifest["kind"] for manifest in shared[0]] == ["Service", "ServiceAccount", "Role", "RoleBinding"]


@pytest.mark.parametrize(
    ("spec", "variable"),
    [({}, "RLJOB_RAY_HEAD"), (JOBS["of another trainer"], "PET_MASTER_ADDR")],
    ids=["own", "other"],
)
def test_the_address_that_pods_join_is_that_of_the_first_pod_in_the_service(spec: Object, variable: str) -> None:
    built = objects(job(**spec))
    first, *others = built.pods
    service = of_kind("Service", built)
    [address] = {entry["value"] for entry in container_of(others[0])["env"] if entry["name"] == variable}
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    assert address.split(":")[0] == f"{first['spec']['hostname']}.{name}.{namespace}.svc"
    assert first["spec"]["subdomain"] == name
    selector = service["spec"]["selector"].items()
    assert [pod for pod in built.pods if selector <= pod["metadata"]["labels"].items()] == [first]


@pytest.mark.parametrize("spec", [{}, DISAGGREGATED], ids=["one worker", "rollout pods"])
def test_the_network_policy_admits_the_pods_of_the_job_alone(spec: Object) -> None:
    built, others = objects(job(**spec)), objects(job("other", **spec), uid="another")
    policy = of_kind("NetworkPolicy", built)["spec"]
    selector = policy["podSelector"]
    assert policy["ingress"] == [{"from": [{"podSelector": selector}]}]
    selected = [selector["matchLabels"].items() <= pod["metadata"]["labels"].items() for pod in built.pods]
    assert all(selected)
    assert not any(selector["matchLabels"].items() <= pod["metadata"]["labels"].items() for pod in others.pods)


def test_the_names_of_the_longest_job_are_still_names() -> None:
    longest = "j" * MAX_JOB_NAME_LENGTH
    spec: Object = {"topology": "Disaggregated", "policy": {"replicas": 1024}, "rollout": {"replicas": 2}}
    built = objects(job(longest, queueName="q", **spec), settings(), number=999_999, gang="Kueue")
    found = [manifest["metadata"]["name"] for manifest in (*built.apply, *built.create, *built.pods)]
    found += [label for pod in built.pods for label in pod["metadata"]["labels"].values()]
    found += [names.object_name(longest), names.kueue_group_name(longest, 999_999)]
    assert max(map(len, found)) <= 63
    assert all(re.fullmatch("[a-z0-9]([-a-z0-9]*[a-z0-9])?", name) for name in found)


def test_the_probe_comes_before_what_the_template_adds() -> None:
    environment = [{"name": "PYTHONPATH", "valueFrom": {"configMapKeyRef": {"name": "paths", "key": "python"}}}]
    template = {"initContainers": [{"name": "fetch", "image": "data:1"}], "containers": [{"env": environment}]}
    of = job(trainer={"image": "verl:1"}, policy={"template": {"spec": template}})
    pod = pod_of(objects(of, settings(probe_image="registry/rljob/operator:1")), "policy")
    assert [container["name"] for container in pod["spec"]["initContainers"]] == ["rljob-probe", "fetch"]
    variables = [entry["name"] for entry in container_of(pod)["env"]]
    assert variables.index("RLJOB_TEMPLATE_PYTHONPATH") < variables.index("PYTHONPATH")
    site = environment_of(pod)["PYTHONPATH"].partition(":")[0]
    assert site.startswith(mounts_of(pod)["rljob-probe"]["mountPath"])


KNOWN_SIZE = {"uri": "hf://Qwen/Qwen3-8B"}
LIMITED = {"template": {"spec": {"containers": [{"resources": {"limits": {"memory": "16Gi"}}}]}}}


@pytest.mark.parametrize(
    ("spec", "is_predicted", "is_too_low"),
    [
        ({"model": KNOWN_SIZE}, True, False),
        ({"model": KNOWN_SIZE, "policy": LIMITED}, False, True),
        ({"model": KNOWN_SIZE, "trainer": {"image": "trainer:1"}}, False, False),
        ({"policy": LIMITED}, False, False),
    ],
    ids=["predicted", "the user's", "another trainer", "unknown size"],
)
def test_a_memory_limit_is_predicted_or_the_users(spec: Object, is_predicted: bool, is_too_low: bool) -> None:
    found = job(**spec).spec
    assert (predicted_limit_bytes(found, "policy") is not None) is is_predicted
    assert predicted_limit_bytes(found, "controller") is None
    message = low_memory_limit(found) or ""
    assert ("expected a memory limit of at least 96." in message and "found 16.00 GiB" in message) is is_too_low
