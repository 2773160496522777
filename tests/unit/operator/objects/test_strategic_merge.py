"""The strategic merge of pods."""

from __future__ import annotations

from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_operator.objects.invalid_template import InvalidTemplate
from rljob_operator.objects.strategic_merge import POD, strategic_merge
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
    result: Object = strategic_merge(BASE, {"spec": spec}, POD, "template")["spec"]
    return result


def merged_container(container: Object) -> Object:
    (result,) = merged({"containers": [{"name": "rljob", **container}]})["containers"]
    assert isinstance(result, dict)
    return result


def test_objects_merge_field_by_field() -> None:
    assert merged({"nodeSelector": {"zone": "a"}})["nodeSelector"] == {"disk": "ssd", "zone": "a"}


def test_a_field_named_like_a_keyed_list_elsewhere_is_just_a_field() -> None:
    result = strategic_merge(BASE, {"metadata": {"labels": {"env": "prod", "volumes": "many"}}}, POD, "template")
    assert result["metadata"]["labels"] == {"a": "1", "env": "prod", "volumes": "many"}


def test_null_deletes_a_field() -> None:
    assert "nodeSelector" not in merged({"nodeSelector": None})
    assert merged({"nodeSelector": {"disk": None}})["nodeSelector"] == {}
    assert merged({"affinity": {"nodeAffinity": None}})["affinity"] == {}


@pytest.mark.parametrize("field", ["command", "args"])
def test_lists_of_plain_values_are_replaced(field: str) -> None:
    assert merged_container({field: ["sh"]})[field] == ["sh"]


def test_tolerations_are_replaced_as_kubernetes_does() -> None:
    assert merged({"tolerations": [{"key": "yours"}]})["tolerations"] == [{"key": "yours"}]


@pytest.mark.parametrize(
    ("field", "element", "expected"),
    [
        ("env", {"name": "C", "value": "3"}, ["A", "B", "C"]),
        ("env", {"name": "A", "value": "2"}, ["A", "B"]),
        ("env", {"name": "A", "$patch": "delete"}, ["B"]),
        ("volumeMounts", {"name": "data", "mountPath": "/data"}, ["shm", "data"]),
        ("volumeMounts", {"name": "other", "mountPath": "/dev/shm"}, ["other"]),
        ("ports", {"containerPort": 6379, "name": "renamed"}, ["renamed"]),
        ("ports", {"containerPort": 6379, "protocol": "UDP", "name": "other"}, ["ray", "other"]),
    ],
)
def test_elements_of_a_keyed_list_are_matched_by_key(field: str, element: Object, expected: list[str]) -> None:
    assert [found["name"] for found in merged_container({field: [element]})[field]] == expected


def test_a_list_can_be_replaced_as_a_whole() -> None:
    assert merged_container({"env": [{"$patch": "replace"}, {"name": "C", "value": "3"}]})["env"] == [
        {"name": "C", "value": "3"}
    ]


def test_an_object_can_be_replaced_as_a_whole() -> None:
    assert merged({"nodeSelector": {"$patch": "replace", "zone": "a"}})["nodeSelector"] == {"zone": "a"}


def test_a_volume_of_another_source_is_that_source_alone() -> None:
    assert merged({"volumes": [{"name": "shm", "hostPath": {"path": "/x"}}]})["volumes"] == [
        {"name": "shm", "hostPath": {"path": "/x"}}
    ]


def test_a_volume_of_the_same_source_is_merged() -> None:
    assert merged({"volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "64Gi"}}]})["volumes"] == [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}}
    ]


def test_a_variable_with_a_value_has_no_reference_left() -> None:
    environment = merged_container({"env": [{"name": "B", "value": "2"}]})["env"]
    assert environment == [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]


@pytest.mark.parametrize(
    ("spec", "said"),
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
def test_what_cannot_be_merged_is_told_with_its_place(spec: Object, said: str) -> None:
    with pytest.raises(InvalidTemplate, match=said):
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


@settings(deadline=None)
@given(specs)
def test_merging_twice_changes_no_more_than_merging_once(spec: Object) -> None:
    patch = {"spec": spec}
    once = strategic_merge(BASE, patch, POD, "template")
    assert strategic_merge(once, patch, POD, "template") == once


@settings(deadline=None)
@given(specs)
def test_merging_changes_neither_side(spec: Object) -> None:
    base, patch = deepcopy(BASE), {"spec": deepcopy(spec)}
    strategic_merge(base, patch, POD, "template")
    assert base == BASE
    assert patch == {"spec": spec}


@settings(deadline=None)
@given(specs)
def test_no_null_and_no_directive_is_left(spec: Object) -> None:
    def leaves(value: object) -> list[object]:
        if isinstance(value, dict):
            return [*value.keys(), *(leaf for below in value.values() for leaf in leaves(below))]
        if isinstance(value, list):
            return [leaf for below in value for leaf in leaves(below)]
        return [value]

    found = leaves(strategic_merge(BASE, {"spec": spec}, POD, "template"))
    assert None not in found
    assert "$patch" not in found


def test_an_empty_patch_changes_nothing() -> None:
    assert strategic_merge(BASE, {}, POD, "template") == BASE
