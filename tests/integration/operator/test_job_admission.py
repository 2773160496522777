"""RLJobs that the API server accepts, and those that it refuses with a message that a user can act on."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from rljob_api.custom_resource import rljob_definition
from rljob_testing.operator.api_client import ApiClient, ApiError, refusal
from rljob_testing.operator.manifests import job
from rljob_testing.repository import ROOT
from tests.integration.operator.conftest import Kubectl
from tests.integration.operator.schema_paths import at, nested, replaced, rules

SCHEMA = rljob_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
RULES = [rule for path, rule in rules(SCHEMA) if "oldSelf" not in rule["rule"] and not path.startswith("status")]
IMMUTABLE_MESSAGE = "cannot change after the job is created: delete the job and create it again"
IMMUTABLE = [path for path, rule in rules(SCHEMA) if rule["rule"] == "self == oldSelf"]
KEPT_PRESENT_OR_ABSENT = [
    (path, rule)
    for path, rule in rules(SCHEMA)
    if "has(oldSelf." in rule["rule"] and "cannot change" in rule["message"]
]

DISAGGREGATED: dict[str, Any] = {"topology": "Disaggregated"}
JSONL: dict[str, Any] = {"name": "jsonl", "args": {"path": "items.jsonl"}}

CONFLICTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # the field that is named, a spec that breaks a rule, one beside it that does not
    ("spec.model.uri", {"model": {"uri": "pvc://models/.."}}, {"model": {"uri": "pvc://models/qwen3"}}),
    ("spec.model.uri", {"model": {"uri": "hf://my org/qwen3"}}, {"model": {"uri": "file:///my models/qwen3"}}),
    ("spec.algorithm.dualClip", {"algorithm": {"dualClip": 1.0}}, {"algorithm": {"dualClip": 0}}),
    ("spec.algorithm.warmupSteps", {"algorithm": {"warmupSteps": 11}}, {"algorithm": {"warmupSteps": 10}}),
    (
        "spec.algorithm.updatesPerStep",
        {"algorithm": {"promptsPerStep": 2, "groupSize": 4, "updatesPerStep": 9}},
        {"algorithm": {"promptsPerStep": 2, "groupSize": 4, "updatesPerStep": 8}},
    ),
    ("spec.task.reward", {"task": JSONL | {"reward": "rw.py:f"}}, {"task": JSONL | {"reward": "rw:f"}}),
    (
        "spec.task.name",
        {"task": {"name": "items.py:load", "reward": "rw:f"}},
        {"task": {"name": "items:load", "reward": "rw:f"}},
    ),
    ("spec.task.reward", {"task": JSONL}, {"task": JSONL | {"reward": "rewards:exact"}}),
    (
        "spec.task.systemPrompt",
        {"task": {"name": "digits", "systemPrompt": "Be brief.", "chatTemplate": "Never"}},
        {"task": {"name": "digits", "systemPrompt": "Be brief.", "chatTemplate": "Auto"}},
    ),
    (
        "spec.task.files.configMap",
        {"task": {"name": "digits", "files": {"configMap": "a", "persistentVolumeClaim": "b"}}},
        {"task": {"name": "digits", "files": {"configMap": "a"}}},
    ),
    (
        "spec.task.files.path",
        {"task": {"name": "digits", "files": {"configMap": "a", "path": "data"}}},
        {"task": {"name": "digits", "files": {"persistentVolumeClaim": "b", "path": "data"}}},
    ),
    ("spec.env[0].value", {"env": [{"name": "A"}]}, {"env": [{"name": "A", "value": "1"}]}),
    (
        "spec.env[0].valueFrom.secretKeyRef",
        {"env": [{"name": "HF_TOKEN", "valueFrom": {}}]},
        {"env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}]},
    ),
    (
        "spec.env[0].name",
        {"env": [{"name": "RLJOB_ROLE", "value": "x"}]},
        {"env": [{"name": "RLJOBS", "value": "x"}]},
    ),
    (
        "spec.env[0].name",
        {"env": [{"name": "PYTORCH_ALLOC_CONF", "value": ""}]},
        {"env": [{"name": "HF_ENDPOINT", "value": "https://hub.example.com"}]},
    ),
    (
        "spec.envFrom[0].secretRef",
        {"envFrom": [{"prefix": "A_"}]},
        {"envFrom": [{"prefix": "A_", "secretRef": {"name": "a"}}]},
    ),
    ("spec.rollout.replicas", {"rollout": {"replicas": 1}}, {"rollout": {"replicas": 1}} | DISAGGREGATED),
    (
        "spec.rollout.gpusPerReplica",
        {"rollout": {"gpusPerReplica": 1}},
        {"rollout": {"gpusPerReplica": 1}} | DISAGGREGATED,
    ),
    ("spec.rollout.template", {"rollout": {"template": {}}}, {"rollout": {"template": {}}} | DISAGGREGATED),
    (
        "spec.memory.rolloutSleep",
        {"memory": {"rolloutSleep": "Level1"}} | DISAGGREGATED,
        {"memory": {"rolloutSleep": "Level1"}},
    ),
    (
        "spec.rollout.gpusPerReplica",
        {"policy": {"gpusPerReplica": 0}} | DISAGGREGATED,
        {"policy": {"gpusPerReplica": 0}, "rollout": {"gpusPerReplica": 0}} | DISAGGREGATED,
    ),
    (
        "spec.rollout.tensorParallelSize",
        {"rollout": {"gpusPerReplica": 2, "tensorParallelSize": 4}} | DISAGGREGATED,
        {"rollout": {"gpusPerReplica": 4, "tensorParallelSize": 2}} | DISAGGREGATED,
    ),
    (
        "spec.rollout.tensorParallelSize",
        {"policy": {"gpusPerReplica": 4}, "rollout": {"tensorParallelSize": 3}, "trainer": {"image": "a"}},
        {"policy": {"gpusPerReplica": 4}, "rollout": {"tensorParallelSize": 2}, "trainer": {"image": "a"}},
    ),
    (
        "spec.checkpoint.volume",
        {"checkpoint": {"volume": {"emptyDir": {}}, "size": "1Gi"}},
        {"checkpoint": {"size": "1Gi"}},
    ),
    (
        "spec.checkpoint.volume",
        {"checkpoint": {"volume": {"emptyDir": {}, "hostPath": {"path": "/data"}}}},
        {"checkpoint": {"volume": {"hostPath": {"path": "/data"}}}},
    ),
    (
        "spec.checkpoint.retain",
        {"checkpoint": {"volume": {"emptyDir": {}}, "retain": True}},
        {"checkpoint": {"size": "1Gi", "retain": True}},
    ),
    (
        "spec.rollout.quantization",
        {"rollout": {"quantization": "Fp8PerTensor"}, "policy": {"gpusPerReplica": 0}},
        {"rollout": {"quantization": "Fp8PerTensor"}, "policy": {"gpusPerReplica": 1}},
    ),
    (
        "spec.rollout.kvCacheDtype",
        {"rollout": {"kvCacheDtype": "Fp8"}, "policy": {"gpusPerReplica": 0}},
        {"rollout": {"kvCacheDtype": "Fp8"}, "policy": {"gpusPerReplica": 1}},
    ),
    (
        "spec.algorithm",
        {"rollout": {"quantization": "Fp8PerTensor"}, "algorithm": {"importanceSampling": {"mode": "Disabled"}}},
        {"rollout": {"quantization": "Fp8PerTensor"}, "algorithm": {"importanceSampling": {"mode": "Truncate"}}},
    ),
    (
        "spec.algorithm",
        {"algorithm": {"maxStaleness": 1, "importanceSampling": {"mode": "Disabled"}}} | DISAGGREGATED,
        {"algorithm": {"maxStaleness": 1, "importanceSampling": {"mode": "Truncate"}}} | DISAGGREGATED,
    ),
    (
        "spec.algorithm.maxStaleness",
        {"algorithm": {"maxStaleness": 1}},
        {"algorithm": {"maxStaleness": 1}} | DISAGGREGATED,
    ),
    (
        "spec.algorithm.partialRolloutPrompts",
        {"algorithm": {"partialRolloutPrompts": 4}} | DISAGGREGATED,
        {"algorithm": {"partialRolloutPrompts": 4, "maxStaleness": 1}} | DISAGGREGATED,
    ),
    (
        "spec.algorithm.partialRolloutPrompts",
        {"algorithm": {"partialRolloutPrompts": 4, "maxStaleness": 1, "promptsPerStep": 4}} | DISAGGREGATED,
        {"algorithm": {"partialRolloutPrompts": 4, "maxStaleness": 1, "promptsPerStep": 5}} | DISAGGREGATED,
    ),
    (
        "spec.algorithm.partialRolloutPrompts",
        {"algorithm": {"partialRolloutPrompts": 4, "maxStaleness": 1, "ignoreEndOfSequence": True}} | DISAGGREGATED,
        {"algorithm": {"partialRolloutPrompts": 4, "maxStaleness": 1, "ignoreEndOfSequence": False}} | DISAGGREGATED,
    ),
    (
        "spec.trainer.adapter",
        {"trainer": {"image": "a", "adapter": "TRL", "probe": "Disabled"}},
        {"trainer": {"image": "a", "adapter": "TRL", "probe": "Enabled"}},
    ),
    ("spec.recovery.maxGpus", {"recovery": {"maxGpus": 2}, "trainer": {"image": "a"}}, {"recovery": {"maxGpus": 2}}),
    (
        "spec.recovery.maxGpus",
        {"recovery": {"maxGpus": 7}, "policy": {"gpusPerReplica": 4}},
        {"recovery": {"maxGpus": 8}, "policy": {"gpusPerReplica": 4}},
    ),
    ("spec.gang", {"queueName": "gpus", "gang": "Volcano"}, {"queueName": "gpus", "gang": "Auto"}),
    (
        "spec.faultInjection.faults",
        {"faultInjection": {"faults": [{"class": "WorkerLost", "phase": "update", "step": 2}]}},
        {"faultInjection": {"enabled": True, "faults": [{"class": "WorkerLost", "phase": "update", "step": 2}]}},
    ),
]


def refused_job(api: ApiClient, namespace: str, manifest: dict[str, Any]) -> ApiError:
    error = refusal(api.create, "rljobs", manifest, namespace)
    assert error is not None
    assert error.status in (400, 422)
    return error


@pytest.mark.parametrize(("field", "invalid", "valid"), CONFLICTS)
def test_conflicting_fields_are_refused_and_the_advice_is_accepted(
    api: ApiClient, namespace: str, field: str, invalid: dict[str, Any], valid: dict[str, Any]
) -> None:
    refused = refused_job(api, namespace, job(**invalid))
    named, message = refused.causes[0]
    assert (named, len(refused.causes)) == (field, 1)
    assert any(rule["message"] in message for rule in RULES)
    api.create("rljobs", job(**valid), namespace)


def test_every_rule_between_fields_is_enforced_by_the_api_server(api: ApiClient, namespace: str) -> None:
    messages = {
        message for _, invalid, _ in CONFLICTS for _, message in refused_job(api, namespace, job(**invalid)).causes
    }
    messages |= {message for name in ("a" * 49, "1st") for _, message in refused_job(api, namespace, job(name)).causes}
    unused = [rule["message"] for rule in RULES if not any(rule["message"] in message for message in messages)]
    assert unused == []


@pytest.mark.parametrize(
    ("spec", "field", "expected"),
    [
        ({"algorithm": {"steps": 0}}, "spec.algorithm.steps", "greater than or equal to 1"),
        ({"algorithm": {"steps": "many"}}, "spec.algorithm.steps", "must be of type integer"),
        ({"algorithm": {"groupSize": 1}}, "spec.algorithm.groupSize", "greater than or equal to 2"),
        ({"topology": "Together"}, "spec.topology", 'supported values: "Colocated", "Disaggregated"'),
        ({"model": {"uri": "SmolLM2"}}, "spec.model.uri", "should match"),
        ({"model": {}}, "spec.model.uri", "Required value"),
        ({"memory": {"kvCache": "lots"}}, "spec.memory.kvCache", "should match"),
        ({"policy": {"gpusPerReplica": -1}}, "spec.policy.gpusPerReplica", "greater than or equal to 0"),
        ({"suspend": "yes"}, "spec.suspend", "must be of type boolean"),
        ({"activeDeadlineSeconds": 0}, "spec.activeDeadlineSeconds", "greater than or equal to 1"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(
    api: ApiClient, namespace: str, spec: dict[str, Any], field: str, expected: str
) -> None:
    refused = refused_job(api, namespace, job(**spec))
    assert field in refused.message
    assert expected in refused.message


def test_an_unknown_field_is_refused_by_name(api: ApiClient, namespace: str) -> None:
    refused = refused_job(api, namespace, job(algorithm={"stepz": 3}))
    assert 'unknown field "spec.algorithm.stepz"' in refused.message


def test_kubectl_apply_shows_the_sentence_that_says_what_to_write(kubectl: Kubectl) -> None:
    manifest = yaml.safe_dump(job(queueName="gpus", gang="Volcano"))
    shown = kubectl("apply", "-f", "-", stdin=manifest, check=False)
    assert shown.returncode != 0
    assert "write gang: Auto, or remove queueName" in shown.stderr


def test_a_name_as_long_as_allowed_passes(api: ApiClient, namespace: str) -> None:
    api.create("rljobs", job("a" * 48), namespace)


def test_the_smallest_manifest_gets_every_default(api: ApiClient, namespace: str) -> None:
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
    assert (stored["algorithm"]["groupSize"], stored["algorithm"]["clipHigh"]) == (8, 0.28)
    assert (stored["recovery"]["maxAdjustments"], stored["recovery"]["maxRestarts"]) == (6, 3)
    assert "volume" not in stored["checkpoint"]


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: str(path.stem))
def test_an_example_applies_as_it_is(kubectl: Kubectl, example: Any) -> None:
    assert "created" in kubectl("apply", "-f", str(example)).stdout


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
        },
        policy={"lora": {"rank": 8}},
        algorithm={"warmupSteps": 1, "promptsPerStep": 4, "groupSize": 4},
        rollout={"replicas": 2, "gpusPerReplica": 2},
    ),
    job(
        "with-claim",
        checkpoint={"size": "1Gi", "storageClassName": "fast"},
        managedBy="kueue.x-k8s.io/multikueue",
    ),
)
"""Two jobs that together have every immutable field, including the optional ones."""

OTHERS: dict[str, Any] = {
    "spec.topology": "Colocated",
    "spec.model": {"uri": "hf://org/other"},
    "spec.task.name": "digits",
    "spec.task.args": {"path": "others.jsonl"},
    "spec.task.reward": "rewards:another",
    "spec.task.files": {"configMap": "another"},
    "spec.task.answer": {"pattern": "<answer>(.*?)</answer>"},
    "spec.task.systemPrompt": "Be kind.",
    "spec.task.promptTemplate": "{question}?",
    "spec.policy.lora.targets": ["q_proj"],
    "spec.algorithm.importanceSampling": {"mode": "Mask", "cap": 3.0},
    "spec.checkpoint.volume": {"persistentVolumeClaim": {"claimName": "another"}},
    "spec.checkpoint.size": "2Gi",
    "spec.checkpoint.storageClassName": "slow",
    "spec.rollout.tensorParallelSize": 2,
    "spec.managedBy": "example.com/another",
}
"""Other values where they do not follow from the type."""


def another(path: str, schema: dict[str, Any], value: Any) -> Any:
    """A value as good as `value` at `path`; None where the schema allows only one."""
    if path in OTHERS:
        return OTHERS[path]
    if "enum" in schema:
        return next((other for other in schema["enum"] if other != value), None)
    if schema["type"] == "boolean":
        return not value
    return value + 1 if schema["type"] == "integer" else value * 0.9 or 0.5


def schema_at(path: str) -> dict[str, Any]:
    schema: dict[str, Any] = SCHEMA
    for name in path.split("."):
        schema = schema["properties"][name]
    return schema


def test_every_field_that_cannot_change_is_refused_when_it_does(api: ApiClient, namespace: str) -> None:
    jobs = [api.create("rljobs", manifest, namespace) for manifest in WHOLE]
    assert len(IMMUTABLE) > 30
    passed = []
    for path in IMMUTABLE:
        stored = next(job for job in jobs if at(job, path) is not None)
        other = another(path, schema_at(path), at(stored, path))
        if other is None:
            continue  # the only algorithm there is
        change, name = nested(path, other), stored["metadata"]["name"]
        refused = refusal(api.merge, "rljobs", name, change, namespace)
        message = refused.message if refused else ""
        if f"{path}: Invalid value" not in message or IMMUTABLE_MESSAGE not in message:
            passed.append((path, message))
    assert passed == []


def test_immutable_optional_fields_can_neither_appear_nor_vanish(api: ApiClient, namespace: str) -> None:
    passed = []
    for path, rule in KEPT_PRESENT_OR_ABSENT:
        field = f"{path}.{rule['message'].split()[0]}"
        given = next(at(manifest, field) for manifest in WHOLE if at(manifest, field) is not None)
        absent = replaced(job("absent", topology="Disaggregated"), path, {"name": "digits"} if "task" in path else {})
        present = replaced(replaced(absent, field, given), "metadata.name", "present")
        for manifest, change in ((present, None), (absent, given)):
            name = api.create("rljobs", manifest, namespace)["metadata"]["name"]
            patch = nested(field, change)
            refused = refusal(api.merge, "rljobs", name, patch, namespace)
            if refused is None or rule["message"] not in refused.message:
                passed.append((field, name))
            api.delete("rljobs", name, namespace)
    assert passed == []


@pytest.mark.parametrize(
    "change",
    [
        {"algorithm": {"steps": 20}},
        {"suspend": True},
        {"memory": {"microBatchTokens": 2048}},
        {"policy": {"template": {"spec": {"nodeSelector": {"pool": "a"}}}}},
        {"recovery": {"maxRestarts": 9, "maxGpus": 2}},
        {"ttlSecondsAfterFinished": 60},
        {"activeDeadlineSeconds": 3600},
        {"checkpoint": {"everySteps": 3}},
    ],
)
def test_what_may_change_can_be_changed(api: ApiClient, namespace: str, change: dict[str, Any]) -> None:
    before = api.create("rljobs", job(), namespace)["metadata"]["generation"]
    assert api.merge("rljobs", "job", {"spec": change}, namespace)["metadata"]["generation"] == before + 1


def test_status_and_spec_are_written_apart(api: ApiClient, namespace: str) -> None:
    """A user's write cannot bring a status along, nor the operator's status write a spec."""
    created = api.create("rljobs", job() | {"status": {"step": 5}}, namespace)
    assert "status" not in created
    assert "status" not in api.merge("rljobs", "job", {"status": {"step": 5}}, namespace)
    both = {"status": {"step": 5}, "spec": {"suspend": True}}
    written = api.merge("rljobs", "job", both, namespace, subresource="status")
    assert (written["status"]["step"], written["spec"]["suspend"]) == (5, False)
    assert written["metadata"]["generation"] == created["metadata"]["generation"]


def test_a_status_of_the_wrong_shape_is_refused(api: ApiClient, namespace: str) -> None:
    api.create("rljobs", job(), namespace)
    condition = {"type": "Running", "status": "Perhaps", "reason": "R", "message": ""}
    with pytest.raises(ApiError, match=r"status.conditions\[0\].status"):
        api.merge("rljobs", "job", {"status": {"conditions": [condition]}}, namespace, subresource="status")
