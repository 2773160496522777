"""Templates of any content: the objects are built within bounds, or the template is refused with its field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from rljob_api.memory_plan import MemoryPlan
from rljob_memory.allocator import setting_problems
from rljob_operator.objects import job_objects
from rljob_operator.objects.job_objects import MAX_BYTES_OF_A_POD, JobObjects
from rljob_operator.objects.strategic_merge import InvalidTemplate
from rljob_testing.memory_plans import memory_plan
from tests.unit.operator.objects.builders import (
    Object,
    container_of,
    environment_of,
    job,
    objects,
    pod_of,
    references_of,
    settings,
    volumes_of,
)
from tests.unit.operator.objects.test_refused_templates import with_container

STRANGE: tuple[Any, ...] = (
    *("", " ", "²", "١", "9" * 5_000, "1e999999", "1e9999999", "-1", "0x10", "NaN", "é", "a" * 300),
    *(0, -1, 2**63, 10**300, 1.5, -0.0, 1e308, True, False, None, [], {}, [None], [[]], [{}], {"": None}, {"name": 5}),
    *({"$patch": "delete"}, {"$patch": "replace"}, {"$patch": 5}, {"$setElementOrder": []}),
)
"""Values at which code for numbers, texts and Kubernetes objects has failed."""

WORDS = """
    name rljob shm value valueFrom limits requests cpu memory nvidia.com/gpu key operator values emptyDir mountPath
    containerPort protocol $patch matchExpressions delete tmp job /dev/shm /run/rljob RLJOB_NAME RAY_AUTH_TOKEN POD_IP
"""
words = st.sampled_from(WORDS.split())
anything = st.recursive(
    st.one_of(st.sampled_from(STRANGE), words),
    lambda below: st.one_of(st.lists(below, max_size=3), st.dictionaries(words, below, max_size=4)),
    max_leaves=10,
)

EXPRESSION: Object = {"key": "pool", "operator": "In", "values": ["h200"]}
TERM: Object = {"matchExpressions": [EXPRESSION], "matchFields": [{**EXPRESSION, "key": "metadata.name"}]}
CONTAINER: Object = {
    "env": [
        {"name": "PYTORCH_ALLOC_CONF", "value": "max_split_size_mb:512"},
        {"name": "PYTHONPATH", "value": "/mine"},
        {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}},
    ],
    "envFrom": [{"configMapRef": {"name": "c"}}],
    "image": "mine:1",
    "livenessProbe": {"exec": {"command": ["true"]}, "terminationGracePeriodSeconds": 5},
    "ports": [{"containerPort": 80, "protocol": "TCP"}],
    "resources": {"limits": {"cpu": "2", "memory": "64Gi"}, "requests": {"cpu": 1}, "claims": [{"name": "a"}]},
    "securityContext": {"capabilities": {"drop": ["ALL"]}},
    "volumeDevices": [{"name": "d", "devicePath": "/dev/d"}],
    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
}
WITH_GPU: Object = {**CONTAINER["resources"], "limits": {**CONTAINER["resources"]["limits"], "nvidia.com/gpu": "1"}}
TEMPLATE: Object = {
    "metadata": {"labels": {"team": "rl"}, "annotations": {"note": "x"}},
    "spec": {
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [TERM]},
                "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": TERM}],
            }
        },
        "containers": [{**CONTAINER, "resources": WITH_GPU}, {**CONTAINER, "name": "side"}],
        "hostAliases": [{"ip": "1.2.3.4", "hostnames": ["a"]}],
        "imagePullSecrets": [{"name": "mine"}],
        "initContainers": [{**CONTAINER, "name": "first"}],
        "nodeSelector": {"pool": "h200"},
        "priorityClassName": "high",
        "resources": {"limits": {"cpu": "4"}},
        "schedulingGates": [{"name": "mine"}],
        "securityContext": {"fsGroup": 5},
        "terminationGracePeriodSeconds": 60,
        "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        "topologySpreadConstraints": [{"topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "maxSkew": 1}],
        "volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "1Gi"}}, {"name": "data", "nfs": {"path": "/"}}],
    },
}
"""Every field that the operator reads or merges by a key."""


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, child in below for found in paths_in(child, (*path, key)))]


PATHS = [path for path in paths_in(TEMPLATE) if len(path) > 1]


def written(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    """`content` with `value` at `path`, as far as an earlier change has left the path there."""
    if not path:
        return value
    key, *rest = path
    if isinstance(content, dict) and key in content:
        return content | {key: written(content[key], tuple(rest), value)}
    if isinstance(content, list) and isinstance(key, int) and key < len(content):
        return [*content[:key], written(content[key], tuple(rest), value), *content[key + 1 :]]
    return content


WITHOUT_GPU = written(TEMPLATE, ("spec", "containers", 0), CONTAINER)
"""For the controller, which may request none."""

PROBING = settings(probe_image="registry/rljob/operator:1")
JOBS: list[Object] = [
    {"model": {"uri": "hf://org/name"}, "topology": "Disaggregated"},
    {"model": {"uri": "random://qwen3"}},  # whose memory is predicted
    {"trainer": {"image": "verl:1"}},
]


@examples(max_examples=300, deadline=None)
@given(
    spec=st.sampled_from(JOBS),
    gang=st.sampled_from(["Native", "Kueue", "Volcano"]),
    changes=st.lists(st.tuples(st.sampled_from(PATHS), anything), max_size=2),
    role=st.sampled_from(["controller", "policy", "rollout"]),
    plan=st.sampled_from([None, memory_plan(generation=2, host_memory_bytes=1 << 40, shared_memory_bytes=1 << 40)]),
)
def test_any_template_makes_whole_pods_or_is_refused_by_its_field(
    spec: Object, gang: str, changes: list[tuple[tuple[Any, ...], Any]], role: str, plan: MemoryPlan | None
) -> None:
    if (role == "rollout" and "topology" not in spec) or (role == "controller" and "trainer" in spec):
        role = "policy"
    template = WITHOUT_GPU if role == "controller" else TEMPLATE
    for path, value in changes:
        template = written(template, path, value)
    changed: Object = {**spec, role: {"template": template}}
    plain = objects(job(queueName="q", **spec), PROBING, gang=gang, plan=plan)
    built: JobObjects | InvalidTemplate
    try:
        built = objects(job(queueName="q", **changed), PROBING, gang=gang, plan=plan)
    except InvalidTemplate as refusal:
        built = refusal
    if isinstance(built, InvalidTemplate):
        assert built.__cause__ is None, "refused by the last resort, and not by a check"
        assert f"spec.{role}.template" in str(built)
        assert len(str(built)) < 2_000
        assert changes, "the template is valid"
        return
    assert max(len(json.dumps(pod)) for pod in built.pods) < MAX_BYTES_OF_A_POD + 4096
    before, after = (pod_of(those, role) for those in (plain, built))
    assert volumes_of(before).keys() <= volumes_of(after).keys()
    mounts = container_of(after)["volumeMounts"]
    assert all(mount in mounts for mount in container_of(before)["volumeMounts"])
    assert needed(environment_of(before)).items() <= environment_of(after).items()
    assert needed(references_of(before)).items() <= references_of(after).items()
    assert after["spec"]["restartPolicy"] == "Never"


def needed(variables: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in variables.items() if name.startswith(("RLJOB_", "RAY_AUTH_", "POD_IP"))}


def test_a_strange_number_in_the_allocator_settings_is_a_problem() -> None:
    for text in STRANGE:
        if isinstance(text, str):
            assert setting_problems(f"max_split_size_mb:{text}", (2, 11)), ascii(text)


@pytest.mark.parametrize(
    ("path", "spec"),
    [
        ("spec.policy.template", {"policy": {"template": with_container(env=[{"name": "A"}])}}),
        ("spec.controller.template", {"controller": {"template": with_container(env=[{"name": "A"}])}}),
        ("spec.controller.template", {role: {"template": {"spec": {"a": 1}}} for role in ("policy", "controller")}),
    ],
)
def test_an_unexpected_error_over_a_template_names_the_template(
    monkeypatch: pytest.MonkeyPatch, path: str, spec: Object
) -> None:
    def merge(pod: Object, template: Any, path: str) -> Object:
        if template.spec:
            raise TypeError("'<' not supported")
        return pod

    monkeypatch.setattr(job_objects, "merge_template", merge)
    with pytest.raises(InvalidTemplate, match=rf"^{path}: expected .* found .*TypeError.*; correct or remove it"):
        objects(job(**spec))


def test_an_error_without_any_template_stays_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def merge(*_: Any) -> Object:
        raise TypeError("a bug")

    monkeypatch.setattr(job_objects, "merge_template", merge)
    with pytest.raises(TypeError, match="a bug"):
        objects(job(policy={"template": with_container(env=[{"name": "A"}])}))


def variables_of(count: int) -> Object:
    return {"spec": {"containers": [{"env": [{"name": f"V{number:x}"} for number in range(count)]}]}}


@pytest.mark.parametrize(
    ("replicas", "variables", "message"),
    [
        (1, 45_000, "spec.policy.template: expected at most 256 KiB for the manifest of a pod, found"),
        (1024, 3_400, "spec: expected at most 32 MiB for the manifests of all pods together, found"),
    ],
)
def test_templates_that_are_too_large_for_their_replicas_are_refused(
    replicas: int, variables: int, message: str
) -> None:
    with pytest.raises(InvalidTemplate, match=message):
        objects(job(policy={"replicas": replicas, "template": variables_of(variables)}))


def test_the_pods_of_a_role_share_all_that_does_not_depend_on_the_index() -> None:
    first, *others = objects(job(policy={"replicas": 1024, "template": variables_of(1_000)})).pods[1:]
    assert len(others) == 1023
    assert all(pod["spec"]["containers"] is first["spec"]["containers"] for pod in others)
    assert [pod["spec"]["hostname"] for pod in others[:2]] == ["sums-policy-1", "sums-policy-2"]
    assert len({pod["metadata"]["name"] for pod in others}) == 1023
