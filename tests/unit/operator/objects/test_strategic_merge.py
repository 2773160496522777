"""The strategic merge of pods."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_operator.objects.strategic_merge import InvalidTemplate, strategic_merge
from tests.unit.operator.objects.builders import Object

BASE: Object = {
    "metadata": {"labels": {"a": "1"}},
    "spec": {
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "ours", "operator": "Exists"}],
        "containers": [
            {
                "name": "rljob",
                "command": ["rljob", "worker"],
                "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}],
                "ports": [{"containerPort": 6379, "protocol": "TCP", "name": "ray"}],
                "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
            }
        ],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "4Gi"}}],
    },
}


def merged(spec: Object) -> Object:
    result: Object = strategic_merge(BASE, {"spec": spec}, "template")["spec"]
    return result


@pytest.mark.parametrize(
    ("spec", "field", "expected"),
    [
        ({}, "nodeSelector", {"disk": "ssd"}),
        ({"nodeSelector": {"zone": "a"}}, "nodeSelector", {"disk": "ssd", "zone": "a"}),
        ({"nodeSelector": None}, "nodeSelector", None),
        ({"nodeSelector": {"disk": None}}, "nodeSelector", {}),
        ({"nodeSelector": {"$patch": "replace", "zone": "a"}}, "nodeSelector", {"zone": "a"}),
        ({"affinity": {"nodeAffinity": None}}, "affinity", {}),
        ({"tolerations": [{"key": "yours"}]}, "tolerations", [{"key": "yours"}]),
        # another source replaces the source of a volume
        ({"volumes": [{"name": "shm", "nfs": {"path": "/x"}}]}, "volumes", [{"name": "shm", "nfs": {"path": "/x"}}]),
        (
            {"volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "64Gi"}}]},
            "volumes",
            [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}}],
        ),
    ],
)
def test_a_field_of_the_pod_is_merged_replaced_or_deleted(spec: Object, field: str, expected: Any) -> None:
    assert merged(spec).get(field) == expected


A, B, C = BASE["spec"]["containers"][0]["env"][0], {"name": "B", "value": "2"}, {"name": "C", "value": "3"}


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        ({"command": ["sh"]}, ["sh"]),
        ({"args": ["sh"]}, ["sh"]),
        ({"env": [{"$patch": "replace"}, C]}, [C]),
        ({"env": [B]}, [A, B]),  # a value replaces a reference
        ({"env": [C]}, ["A", "B", "C"]),
        ({"env": [{"name": "A", "$patch": "delete"}]}, ["B"]),
        ({"volumeMounts": [{"name": "data", "mountPath": "/data"}]}, ["shm", "data"]),
        ({"volumeMounts": [{"name": "other", "mountPath": "/dev/shm"}]}, ["other"]),
        ({"ports": [{"containerPort": 6379, "name": "renamed"}]}, ["renamed"]),
        ({"ports": [{"containerPort": 6379, "protocol": "UDP", "name": "other"}]}, ["ray", "other"]),
    ],
)
def test_lists_of_a_container_are_merged_by_key_or_replaced(container: Object, expected: list[Any]) -> None:
    """`expected`: the elements, or their names."""
    (found,) = merged({"containers": [{"name": "rljob", **container}]})["containers"]
    (field,) = container
    assert expected in (found[field], [element["name"] for element in found[field] if isinstance(element, dict)])


def test_a_field_named_like_a_keyed_list_elsewhere_is_just_a_field() -> None:
    result = strategic_merge(BASE, {"metadata": {"labels": {"env": "prod", "volumes": "many"}}}, "template")
    assert result["metadata"]["labels"] == {"a": "1", "env": "prod", "volumes": "many"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"containers": {"name": "rljob"}}, r"^template.spec.containers: expected a list, found an object$"),
        ({"containers": ["rljob"]}, r"^template.spec.containers\[0\]: expected an object, found a value$"),
        ({"volumes": [{"emptyDir": {}}]}, r"^template.spec.volumes\[0\].name: expected the name of the element"),
        ({"nodeSelector": ["ssd"]}, r"^template.spec.nodeSelector: expected an object, found a list$"),
        ({"nodeSelector": {"$patch": "drop"}}, r"expected merge, replace or delete, found 'drop'$"),
        ({"$setElementOrder/containers": []}, r"expected no directive but \$patch"),
        ({"volumes": [{"name": "a"}, {"name": "a"}]}, r"^template.spec.volumes\[1\]: name a appears twice"),
    ],
)
def test_a_patch_that_does_not_fit_is_refused_with_its_path(spec: Object, message: str) -> None:
    with pytest.raises(InvalidTemplate, match=message):
        merged(spec)


names = st.sampled_from(["rljob", "shm", "A", "B", "x"])
values = st.sampled_from([None, "a", "b", 1])
entries = st.fixed_dictionaries({"name": names}, optional={"value": st.sampled_from("ab"), "$patch": st.just("delete")})
containers = st.fixed_dictionaries(
    {"name": names},
    optional={
        "image": values,
        "command": st.lists(st.sampled_from("ab"), max_size=2),
        "env": st.lists(entries, max_size=3, unique_by=lambda entry: entry["name"]),
        "$patch": st.just("delete"),
    },
)
specs = st.fixed_dictionaries(
    {},
    optional={
        "nodeSelector": st.one_of(st.none(), st.dictionaries(names, values, max_size=3)),
        "priority": values,
        "containers": st.lists(containers, max_size=3, unique_by=lambda container: str(container["name"])),
        "volumes": st.lists(
            st.fixed_dictionaries({"name": names}, optional={"emptyDir": st.just({}), "nfs": st.just({"path": "/"})}),
            max_size=3,
            unique_by=lambda volume: str(volume["name"]),
        ),
    },
)


def leaves(value: object) -> list[object]:
    if isinstance(value, dict):
        return [*value.keys(), *(leaf for below in value.values() for leaf in leaves(below))]
    if isinstance(value, list):
        return [leaf for below in value for leaf in leaves(below)]
    return [value]


@settings(deadline=None)
@given(specs)
def test_merging_is_idempotent_and_leaves_neither_nulls_nor_directives(spec: Object) -> None:
    base, patch = deepcopy(BASE), {"spec": deepcopy(spec)}
    once = strategic_merge(base, patch, "template")
    assert strategic_merge(once, patch, "template") == once
    assert not {None, "$patch"} & set(leaves(once))
    assert (base, patch) == (BASE, {"spec": spec}), "neither side changes"
