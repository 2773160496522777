"""RLJobs that the API server accepts, and those that it refuses with a message that a user can act on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from rljob_api.custom_resource import rljob_definition
from rljob_testing.operator.api_client import RequestRefused, ResourceClient, refusal
from rljob_testing.operator.manifests import job
from rljob_testing.repository import ROOT
from tests.integration.operator.conftest import Kubectl
from tests.unit.api.test_rules import EXAMPLES

Object = dict[str, Any]


def rules(schema: Object, path: str = "") -> Iterator[tuple[str, Object]]:
    """(path of the object it is about, rule) of every CEL rule in the schema."""
    for rule in schema.get("x-kubernetes-validations", []):
        yield path, rule
    for name, below in schema.get("properties", {}).items():
        yield from rules(below, f"{path}.{name}".removeprefix("."))
    if isinstance(schema.get("items"), dict):
        yield from rules(schema["items"], f"{path}[]")


def at(value: Object, path: str) -> Any:
    """The value at the path; None if a part of it is absent."""
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None  # type: ignore[assignment]
    return value


def replaced(value: Object, path: str, new: Any) -> Object:
    """A copy with something else at the path; `new` None: without it."""
    name, _, rest = path.partition(".")
    copy = dict(value)
    if rest:
        copy[name] = replaced(copy.get(name) or {}, rest, new)
    elif new is None:
        copy.pop(name, None)
    else:
        copy[name] = new
    return copy


def nested(path: str, value: Any) -> Object:
    """An object with nothing but `value`, at the path: as a merge patch, it changes that alone, and None removes."""
    name, _, rest = path.partition(".")
    return {name: nested(rest, value) if rest else value}


SCHEMA = rljob_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
RULES = [rule for path, rule in rules(SCHEMA) if "oldSelf" not in rule["rule"] and not path.startswith("status")]
IMMUTABLE_MESSAGE = "cannot change after the job is created: delete the job and create it again"
IMMUTABLE = [
    path
    for path, rule in rules(SCHEMA)
    if rule["rule"] == "self == oldSelf" and not path.startswith("spec.evaluation.task.")  # of the type of spec.task
]
KEPT_PRESENT_OR_ABSENT = [
    (path, rule)
    for path, rule in rules(SCHEMA)
    if "has(oldSelf." in rule["rule"] and "cannot change" in rule["message"] and "fieldPath" not in rule
]

JSONL: Object = {"name": "jsonl", "args": {"path": "items.jsonl"}}


def refused_job(api: ResourceClient, namespace: str, manifest: Object) -> RequestRefused:
    error = refusal(api.create, "rljobs", manifest, namespace)
    assert error is not None
    assert error.status in (400, 422)
    return error


def test_every_rule_between_fields_is_enforced_and_names_one_field(api: ResourceClient, namespace: str) -> None:
    specs = [each["invalid"] | {"task": {"name": "digits"} | each["invalid"].get("task", {})} for each in EXAMPLES]
    causes = [refused_job(api, namespace, job(**spec)).causes for spec in specs]
    refused = list(zip([each["field"] for each in EXAMPLES], causes, strict=True))
    assert [[named for named, _ in causes] for _, causes in refused] == [[f"spec.{field}"] for field, _ in refused]
    refused += [("name", refused_job(api, namespace, job(name)).causes) for name in ("a" * 49, "1st")]
    messages = [message for _, causes in refused for _, message in causes]
    assert [rule["message"] for rule in RULES if not any(rule["message"] in message for message in messages)] == []
    api.create("rljobs", job("a" * 48), namespace)


def test_a_value_out_of_bounds_is_refused_by_name(api: ResourceClient, namespace: str) -> None:
    invalid: list[tuple[str, Any, str]] = [
        ("algorithm.steps", 0, "greater than or equal to 1"),
        ("algorithm.steps", "many", "must be of type integer"),
        ("topology", "Together", 'supported values: "Colocated", "Disaggregated"'),
        ("model.uri", "SmolLM2", "should match"),
        ("model.uri", None, "Required value"),
        ("memory.kvCache", "lots", "should match"),
        ("suspend", "yes", "must be of type boolean"),
        ("algorithm.stepz", 3, 'unknown field "spec.algorithm.stepz"'),
    ]
    for field, value, expected in invalid:
        refused = refused_job(api, namespace, replaced(job(), f"spec.{field}", value))
        assert f"spec.{field}" in refused.message
        assert expected in refused.message


def test_kubectl_apply_shows_what_to_write_instead(kubectl: Kubectl) -> None:
    shown = kubectl("apply", "-f", "-", stdin=yaml.safe_dump(job(queueName="gpus", gang="Volcano")), check=False)
    assert shown.returncode != 0
    assert "write gang: Auto, or remove queueName" in shown.stderr


def test_the_smallest_manifest_gets_every_default(api: ResourceClient, namespace: str) -> None:
    spec = {"model": {"uri": "hf://org/name"}, "task": {"name": "digits"}, "algorithm": {"steps": 3}}
    stored = api.create("rljobs", job() | {"spec": spec}, namespace)["spec"]
    assert stored["topology"] == "Colocated"
    assert stored["suspend"] is False
    assert stored["policy"] == {
        "replicas": 1,
        "gpusPerReplica": 1,
        "optimizer": {"moments": "float32"},
        "template": {},
    }
    assert (stored["algorithm"]["groupSize"], stored["algorithm"].get("clipHigh")) == (8, None)
    assert (stored["recovery"]["maxAdjustments"], stored["recovery"]["maxRestarts"]) == (6, 3)
    assert "volume" not in stored["checkpoint"]


def test_the_examples_apply_as_they_are(kubectl: Kubectl) -> None:
    examples = sorted((ROOT / "examples").glob("*.yaml"))
    applied = kubectl("apply", *(f"--filename={example}" for example in examples)).stdout
    assert applied.count("created") >= len(examples) > 0


WHOLE = (
    job(
        "with-volume",
        topology="Disaggregated",
        task=JSONL
        | {
            "reward": "rewards:exact",
            "files": {"configMap": "task"},
            "answer": {"pattern": "(.*)"},
            "systemPrompt": "Be brief.",
            "chatTemplateArgs": {"enable_thinking": False},
        },
        policy={"lora": {"rank": 8}},
        algorithm={
            "warmupSteps": 1,
            "promptsPerStep": 4,
            "groupSize": 4,
            "loss": "losses:mine",
            "advantage": "losses:mine",
            "clipLow": 0.1,
            "clipHigh": 0.3,
            "dualClip": 4.0,
            "scaleAdvantages": "None",
            "lossAggregation": "SequenceMean",
            "dynamicSampling": {"maxRounds": 3},
            "overlongPenalty": {"bufferTokens": 8},
        },
        rollout={"replicas": 2, "gpusPerReplica": 2, "tensorParallelSize": 1},
    ),
    job(
        "with-claim",
        checkpoint={"size": "1Gi", "storageClassName": "fast"},
        managedBy="kueue.x-k8s.io/multikueue",
        task=JSONL | {"rewards": [{"function": "rewards:exact", "weight": 2.0}, {"name": "exact_match"}]},
    ),
)
"""Two jobs that together have every immutable field, including the optional ones."""

OTHERS: Object = {
    "spec.topology": "Colocated",
    "spec.model": {"uri": "hf://org/other"},
    "spec.task.name": "digits",
    "spec.task.args": {"path": "others.jsonl"},
    "spec.task.reward": "rewards:another",
    "spec.task.rewards": [{"name": "exact_match"}],
    "spec.task.files": {"configMap": "another"},
    "spec.task.answer": {"pattern": "<answer>(.*?)</answer>"},
    "spec.task.systemPrompt": "Be kind.",
    "spec.task.chatTemplateArgs": {"enable_thinking": True},
    "spec.task.promptTemplate": "{question}?",
    "spec.policy.lora.targets": ["q_proj"],
    "spec.algorithm.importanceSampling": {"mode": "Mask", "cap": 3.0},
    "spec.algorithm.learningRateSchedule": {"name": "linear"},
    "spec.algorithm.stop": ["</answer>"],
    "spec.algorithm.topK": 9,
    "spec.algorithm.dynamicSampling": {"maxRounds": 4},
    "spec.algorithm.overlongPenalty": {"bufferTokens": 9},
    "spec.algorithm.loss": "losses:another",
    "spec.algorithm.advantage": "losses:another",
    "spec.checkpoint.volume": {"persistentVolumeClaim": {"claimName": "another"}},
    "spec.checkpoint.size": "2Gi",
    "spec.checkpoint.storageClassName": "slow",
    "spec.rollout.tensorParallelSize": 2,
    "spec.managedBy": "example.com/another",
}
"""Other values where they do not follow from the type."""


def another(path: str, schema: Object, value: Any) -> Any:
    """A value as good as `value` at `path`; None where the schema allows only one."""
    if path in OTHERS:
        return OTHERS[path]
    if "enum" in schema:
        return next((other for other in schema["enum"] if other != value), None)
    if schema["type"] == "boolean":
        return not value
    return value + 1 if schema["type"] == "integer" else value * 0.9 or 0.5


def schema_at(path: str) -> Object:
    schema: Object = SCHEMA
    for name in path.split("."):
        schema = schema["properties"][name]
    return schema


def test_every_field_that_cannot_change_is_refused_when_it_does(api: ResourceClient, namespace: str) -> None:
    jobs = [api.create("rljobs", manifest, namespace) for manifest in WHOLE]
    assert len(IMMUTABLE) > 30
    passed = []
    for path in IMMUTABLE:
        stored = next(job for job in jobs if at(job, path) is not None)
        other = another(path, schema_at(path), at(stored, path))
        if other is None:
            continue
        change, name = nested(path, other), stored["metadata"]["name"]
        refused = refusal(api.merge, "rljobs", name, change, namespace)
        message = refused.message if refused else ""
        if f"{path}: Invalid value" not in message or IMMUTABLE_MESSAGE not in message:
            passed.append((path, message))
    assert passed == []


def _smallest(path: str) -> Object:
    """The smallest valid object at the path."""
    smallest: dict[str, Object] = {"task": {"name": "digits"}, "algorithm": {"steps": 10}}
    return smallest.get(path.rpartition(".")[2], {})


def test_immutable_optional_fields_can_neither_appear_nor_vanish(api: ResourceClient, namespace: str) -> None:
    passed = []
    for number, (path, rule) in enumerate(KEPT_PRESENT_OR_ABSENT):
        field = f"{path}.{rule['message'].split()[0]}"
        given = next(at(manifest, field) for manifest in WHOLE if at(manifest, field) is not None)
        absent = replaced(job("absent", topology="Disaggregated"), path, _smallest(path))
        present = replaced(replaced(absent, field, given), "metadata.name", "present")
        for manifest, change in ((present, None), (absent, given)):
            name = f"{manifest['metadata']['name']}-{number}"  # a name may be taken until the operator has let a job go
            api.create("rljobs", replaced(manifest, "metadata.name", name), namespace)
            patch = nested(field, change)
            refused = refusal(api.merge, "rljobs", name, patch, namespace)
            if refused is None or rule["message"] not in refused.message:
                passed.append((field, name))
            api.delete("rljobs", name, namespace)
    assert passed == []


def test_held_out_prompts_stay_the_same(api: ResourceClient, namespace: str) -> None:
    api.create("rljobs", job("evaluated", evaluation={"heldOut": 2}), namespace)
    for change in ({"heldOut": 3}, None):
        refused = refusal(api.merge, "rljobs", "evaluated", {"spec": {"evaluation": change}}, namespace)
        assert refused is not None
        assert "heldOut cannot change" in refused.message
    api.merge("rljobs", "evaluated", {"spec": {"evaluation": {"everySteps": 5}}}, namespace)


def test_what_may_change_can_be_changed(api: ResourceClient, namespace: str) -> None:
    changes: list[Object] = [
        {"algorithm": {"steps": 20}},
        {"suspend": True},
        {"memory": {"microBatchTokens": 2048}},
        {"policy": {"template": {"spec": {"nodeSelector": {"pool": "a"}}}}},
        {"recovery": {"maxRestarts": 9, "maxGpus": 2}},
        {"ttlSecondsAfterFinished": 60},
        {"activeDeadlineSeconds": 3600},
        {"checkpoint": {"everySteps": 3}},
    ]
    before = api.create("rljobs", job(), namespace)["metadata"]["generation"]
    changed = [api.merge("rljobs", "job", {"spec": change}, namespace)["metadata"]["generation"] for change in changes]
    assert changed == [before + 1 + count for count in range(len(changes))]


def test_status_and_spec_are_written_apart(api: ResourceClient, namespace: str) -> None:
    """A user's write cannot bring a status along, nor the operator's status write a spec."""
    created = api.create("rljobs", job() | {"status": {"step": 5}}, namespace)
    assert "status" not in created
    assert "status" not in api.merge("rljobs", "job", {"status": {"step": 5}}, namespace)
    both = {"status": {"step": 5}, "spec": {"suspend": True}}
    written = api.merge("rljobs", "job", both, namespace, subresource="status")
    assert (written["status"]["step"], written["spec"]["suspend"]) == (5, False)
    assert written["metadata"]["generation"] == created["metadata"]["generation"]


def test_a_status_of_the_wrong_shape_is_refused(api: ResourceClient, namespace: str) -> None:
    api.create("rljobs", job(), namespace)
    condition = {"type": "Running", "status": "Perhaps", "reason": "R", "message": ""}
    with pytest.raises(RequestRefused, match=r"status.conditions\[0\].status"):
        api.merge("rljobs", "job", {"status": {"conditions": [condition]}}, namespace, subresource="status")
