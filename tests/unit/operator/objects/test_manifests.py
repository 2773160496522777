"""The objects of each kind of job, in full for a plain one and as differences for the others: manifests.yaml.

`python -m tests.unit.operator.objects.test_manifests` writes the differences.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_operator.labels import MEMORY_PLAN, SPEC_DIGEST
from rljob_operator.objects.job_objects import JobObjects
from rljob_testing.memory_plans import memory_plan
from tests.unit.operator.objects.builders import CHANGE, COMMON_LABELS, Object, job, objects, settings

FILE = Path(__file__).with_name("manifests.yaml")
CASES: dict[str, Object] = {case["job"]: case for case in yaml.safe_load_all(FILE.read_text())}
OTHER_LABELS = ("app.kubernetes.io/component", "rljob.dev/role", "rljob.dev/index")


def built(case: Object) -> JobObjects:
    """`base` names a case that this one adds to. `plan`: fields that differ from a small plan."""
    parts: Object = {}
    while True:
        parts = merged(case, parts)
        if "base" not in case:
            break
        case = CASES[case["base"]]
    given = dict(parts.get("given", {}))
    if "plan" in parts:
        given |= {"plan": memory_plan(**{"generation": 3, **parts["plan"]}), "plan_changes": [CHANGE]}
    of = job(metadata=parts.get("metadata"), **parts.get("spec", {}))
    return objects(of, settings(**parts.get("settings", {})), **given)


def merged(before: Any, after: Any) -> Any:
    if not isinstance(before, dict) or not isinstance(after, dict):
        return after
    return before | {name: merged(before[name], value) if name in before else value for name, value in after.items()}


def summary(of: JobObjects) -> Object:
    """All objects in a form that is short to write: lists of named elements are objects, and only the first pod of each
    role is shown. The manifest in the ConfigMap and the labels of all objects have tests of their own."""
    shown: Object = {"pods": [pod["metadata"]["name"] for pod in of.pods]}
    for manifest in (*of.apply, *of.create):
        fields = {name: value for name, value in manifest.items() if name not in ("apiVersion", "kind", "metadata")}
        if manifest["kind"] == "ConfigMap":
            fields = {name: json.loads(text) for name, text in manifest["data"].items() if name != "job.yaml"}
        shown[manifest["kind"]] = metadata(manifest) | fields
    for pod in reversed(of.pods):
        spec = {name: value for name, value in pod["spec"].items() if name not in ("containers", "initContainers")}
        containers = named([*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])])
        spec["volumes"] = named(spec["volumes"])
        shown[pod["metadata"]["labels"]["rljob.dev/role"]] = metadata(pod) | spec | containers
    notices = [f"{notice.type} {notice.reason}" for notice in of.notices]
    return shown | {"require": of.required_config_map, "notices": notices}


def metadata(manifest: Object) -> Object:
    found = manifest["metadata"]
    labels = {name: value for name, value in found["labels"].items() if name not in (*COMMON_LABELS, *OTHER_LABELS)}
    annotations = {name: value for name, value in found.get("annotations", {}).items() if name != SPEC_DIGEST}
    if MEMORY_PLAN in annotations:
        annotations[MEMORY_PLAN] = json.loads(annotations[MEMORY_PLAN])
    shown = {"labels": labels, "annotations": annotations, "unowned": "ownerReferences" not in found}
    return {"name": found["name"], **{name: value for name, value in shown.items() if value}}


def named(elements: list[Object], key: str = "name") -> Object:
    shown = {element[key]: {name: value for name, value in element.items() if name != key} for element in elements}
    for element in shown.values():
        if "env" in element:
            element["env"] = {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in element["env"]}
        if "volumeMounts" in element:
            element["volumeMounts"] = named(element["volumeMounts"], "mountPath")
    assert len(shown) == len(elements), "a name occurs once"
    return shown


def difference(before: Any, after: Any) -> Any:
    """The fields of `after` that differ from `before`; null: it is absent."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return after
    fields = [*before, *(name for name in after if name not in before)]
    return {
        name: difference(before.get(name), after.get(name)) for name in fields if before.get(name) != after.get(name)
    }


def by_path(tree: Object, path: str = "") -> Object:
    """`tree` with the objects in it by their paths."""
    below = {f"{path}.{name}".removeprefix("."): value for name, value in tree.items() if isinstance(value, dict)}
    leaves = {name: value for name, value in tree.items() if not isinstance(value, dict)}
    found = leaves if not path else {path: leaves} if leaves or not below else {}
    for name, value in below.items():
        found |= by_path(value, name)
    return found


def differences(case: Object) -> Object:
    """Between the objects of `case` and those of the case that it adds to. A difference of all pods is stated once, and
    a role that is new is compared with the policy."""
    before = summary(built(CASES[case["base"]])) if "base" in case else {}
    after = summary(built(case))
    found: Object = difference(before, after)
    for role in ("controller", "rollout"):
        if role in after and role not in before:
            found[f"{role} unlike policy"] = difference(after["policy"], found.pop(role))
    roles = [role for role in ("controller", "policy", "rollout") if before.get(role)]
    if len(roles) > 1 and found.get(roles[0]) and all(found.get(role) == found[roles[0]] for role in roles):
        found["every pod"] = found.pop(roles[0])
        found = {name: value for name, value in found.items() if name not in roles}
    return by_path(found)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_job_has_the_objects_that_are_written_down(case: Object) -> None:
    assert differences(case) == case["objects"]


class Dumper(yaml.SafeDumper):
    """Writes an object without objects in it in one line, if it is short."""

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        node = super().represent_mapping(tag, mapping, flow_style)
        node.flow_style = node.flow_style and len(str(mapping)) < 100
        return node


if __name__ == "__main__":
    documents = []
    for document in FILE.read_text().split("---\n"):
        found = {"objects": json.loads(json.dumps(differences(yaml.safe_load(document))))}
        text = yaml.dump(found, Dumper=Dumper, sort_keys=False, default_flow_style=None, width=120)
        documents.append(document.partition("objects:")[0] + text)
    FILE.write_text("---\n".join(documents))
