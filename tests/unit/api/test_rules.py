"""Rules between fields exist twice, in CEL and in Python, and must agree."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.all_errors import all_errors
from rljob_api.job import RLJob
from rljob_api.manifest import dotted
from rljob_api.structural_schema import structural_schema
from tests.unit.api.api_server import broken_rules, holds, parts, with_defaults

SCHEMA = structural_schema(RLJob)


def job(**spec: Any) -> dict[str, Any]:
    """A valid manifest with the given parts of its spec."""
    algorithm = {"steps": 100} | spec.pop("algorithm", {})
    task = {"name": "digits"} | spec.pop("task", {})
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "job"},
        "spec": {"model": {"uri": "hf://org/name"}, "task": task, "algorithm": algorithm, **spec},
    }


def told_by_cel(manifest: dict[str, Any]) -> set[tuple[str, str]]:
    return broken_rules(with_defaults(manifest, SCHEMA), SCHEMA)


def told_by_python(manifest: dict[str, Any]) -> set[tuple[str, str]]:
    return {(dotted(error["loc"]), error["msg"]) for error in all_errors(manifest)}


DISAGGREGATED: dict[str, Any] = {"topology": "Disaggregated"}
ANOTHER = {"image": "registry/trainer:1"}

EXAMPLES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # the field that is named, an invalid job, a valid one beside it
    ("spec.model.uri", job(model={"uri": "pvc:///path"}), job(model={"uri": "pvc://models"})),
    ("spec.model.uri", job(model={"uri": "hf://org/my name"}), job(model={"uri": "file:///models/my name"})),
    ("spec.model.uri", job(model={"uri": "pvc://Models/path"}), job(model={"uri": "pvc://models/a..b/.c"})),
    ("spec.model.uri", job(model={"uri": "pvc://models/a/.."}), job(model={"uri": "hf://../b"})),
    ("spec.task.reward", job(task={"reward": "rw.py:f"}), job(task={"reward": "rw.pyx:f"})),
    (
        "spec.task.name",
        job(task={"name": "items.py:load", "reward": "rw:f"}),
        job(task={"name": "items:load", "reward": "rw:f"}),
    ),
    ("spec.algorithm.dualClip", job(algorithm={"dualClip": 1.0}), job(algorithm={"dualClip": 0.0})),
    ("spec.algorithm.warmupSteps", job(algorithm={"warmupSteps": 101}), job(algorithm={"warmupSteps": 100})),
    (
        "spec.trainer.adapter",
        job(trainer={"image": "trl:1", "adapter": "TRL", "probe": "Disabled"}),
        job(trainer={"image": "trl:1", "adapter": "TRL"}),
    ),
    (
        "spec.algorithm.updatesPerStep",
        job(algorithm={"promptsPerStep": 2, "groupSize": 4, "updatesPerStep": 9}),
        job(algorithm={"promptsPerStep": 2, "groupSize": 4, "updatesPerStep": 8}),
    ),
    (
        "spec.task.reward",
        job(task={"name": "jsonl", "args": {"path": "p"}}),
        job(task={"name": "jsonl", "args": {"path": "p"}, "reward": "r:f"}),
    ),
    ("spec.task.reward", job(task={"name": "my.tasks:words"}), job(task={"name": "my.tasks:words", "reward": "r:f"})),
    (
        "spec.task.systemPrompt",
        job(task={"systemPrompt": "Be brief.", "chatTemplate": "Never"}),
        job(task={"systemPrompt": "Be brief.", "chatTemplate": "Always"}),
    ),
    (
        "spec.task.files.configMap",
        job(task={"files": {"configMap": "a", "persistentVolumeClaim": "b"}}),
        job(task={"files": {"configMap": "a"}}),
    ),
    ("spec.task.files.configMap", job(task={"files": {}}), job(task={"files": {"persistentVolumeClaim": "b"}})),
    (
        "spec.task.files.path",
        job(task={"files": {"configMap": "a", "path": "data"}}),
        job(task={"files": {"persistentVolumeClaim": "b", "path": "data/train"}}),
    ),
    ("spec.env[0].value", job(env=[{"name": "A"}]), job(env=[{"name": "A", "value": "1"}])),
    (
        "spec.env[0].valueFrom.secretKeyRef",
        job(env=[{"name": "HF_TOKEN", "valueFrom": {}}]),
        job(env=[{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}]),
    ),
    ("spec.env[0].name", job(env=[{"name": "RLJOB_ROLE", "value": "x"}]), job(env=[{"name": "RLJOBS", "value": "x"}])),
    ("spec.env[0].name", job(env=[{"name": "HOME", "value": "/"}]), job(env=[{"name": "HOMES", "value": "/"}])),
    (
        "spec.env[0].name",
        job(env=[{"name": "PYTORCH_ALLOC_CONF", "value": ""}]),
        job(env=[{"name": "PYTORCH_NVML_BASED_CUDA_CHECK", "value": "1"}]),
    ),
    (
        "spec.envFrom[0].secretRef",
        job(envFrom=[{"prefix": "A_"}]),
        job(envFrom=[{"prefix": "A_", "secretRef": {"name": "a"}}]),
    ),
    ("spec.rollout.replicas", job(rollout={"replicas": 1}), job(rollout={"replicas": 1}, **DISAGGREGATED)),
    (
        "spec.rollout.gpusPerReplica",
        job(rollout={"gpusPerReplica": 1}),
        job(rollout={"gpusPerReplica": 1}, **DISAGGREGATED),
    ),
    ("spec.rollout.template", job(rollout={"template": {}}), job(rollout={"template": {}}, **DISAGGREGATED)),
    (
        "spec.memory.rolloutSleep",
        job(memory={"rolloutSleep": "Level2"}, **DISAGGREGATED),
        job(memory={"rolloutSleep": "Level2"}),
    ),
    (
        "spec.rollout.gpusPerReplica",
        job(policy={"gpusPerReplica": 0}, **DISAGGREGATED),
        job(policy={"gpusPerReplica": 0}, rollout={"gpusPerReplica": 0}, **DISAGGREGATED),
    ),
    (
        "spec.rollout.tensorParallelSize",
        job(policy={"replicas": 2, "gpusPerReplica": 1}, rollout={"tensorParallelSize": 2}),
        job(policy={"replicas": 2, "gpusPerReplica": 4}, rollout={"tensorParallelSize": 2}),
    ),
    (
        "spec.rollout.tensorParallelSize",
        job(rollout={"gpusPerReplica": 6, "tensorParallelSize": 4}, **DISAGGREGATED),
        job(rollout={"gpusPerReplica": 8, "tensorParallelSize": 4}, **DISAGGREGATED),
    ),
    (
        "spec.rollout.tensorParallelSize",
        job(policy={"gpusPerReplica": 0}, rollout={"tensorParallelSize": 2}),
        job(policy={"gpusPerReplica": 0}, rollout={"gpusPerReplica": 0, "tensorParallelSize": 2}, **DISAGGREGATED),
    ),
    (
        "spec.rollout.tensorParallelSize",
        job(
            policy={"gpusPerReplica": 0},
            rollout={"gpusPerReplica": 0, "tensorParallelSize": 2},
            trainer=ANOTHER,
            **DISAGGREGATED,
        ),
        job(policy={"gpusPerReplica": 0}, rollout={"gpusPerReplica": 0}, trainer=ANOTHER, **DISAGGREGATED),
    ),
    (
        "spec.rollout.tensorParallelSize",
        job(policy={"gpusPerReplica": 4}, rollout={"tensorParallelSize": 3}, trainer=ANOTHER),
        job(policy={"gpusPerReplica": 4}, rollout={"tensorParallelSize": 2}, trainer=ANOTHER),
    ),
    (
        "spec.rollout.tensorParallelSize",
        job(policy={"gpusPerReplica": 4}, rollout={"tensorParallelSize": 2}, trainer=ANOTHER, **DISAGGREGATED),
        job(rollout={"gpusPerReplica": 2, "tensorParallelSize": 2}, trainer=ANOTHER, **DISAGGREGATED),
    ),
    (
        "spec.algorithm.maxStaleness",
        job(algorithm={"maxStaleness": 1}),
        job(algorithm={"maxStaleness": 1}, **DISAGGREGATED),
    ),
    (
        "spec.algorithm.partialRolloutPrompts",
        job(algorithm={"partialRolloutPrompts": 1}, **DISAGGREGATED),
        job(algorithm={"partialRolloutPrompts": 1, "maxStaleness": 1}, **DISAGGREGATED),
    ),
    (
        "spec.algorithm.partialRolloutPrompts",
        job(algorithm={"partialRolloutPrompts": 4, "promptsPerStep": 4, "maxStaleness": 1}, **DISAGGREGATED),
        job(algorithm={"partialRolloutPrompts": 3, "promptsPerStep": 4, "maxStaleness": 1}, **DISAGGREGATED),
    ),
    (
        "spec.algorithm.partialRolloutPrompts",
        job(algorithm={"partialRolloutPrompts": 1, "maxStaleness": 1, "ignoreEndOfSequence": True}, **DISAGGREGATED),
        job(algorithm={"partialRolloutPrompts": 1, "maxStaleness": 1}, **DISAGGREGATED),
    ),
    (
        "spec.algorithm",
        job(algorithm={"maxStaleness": 1, "importanceSampling": {"mode": "Disabled"}}, **DISAGGREGATED),
        job(algorithm={"maxStaleness": 1, "importanceSampling": {"mode": "Mask"}}, **DISAGGREGATED),
    ),
    (
        "spec.checkpoint.volume",
        job(checkpoint={"volume": {"emptyDir": {}}, "size": "1Gi"}),
        job(checkpoint={"size": "1Gi", "storageClassName": "fast"}),
    ),
    (
        "spec.checkpoint.volume",
        job(checkpoint={"volume": {"emptyDir": {}, "hostPath": {"path": "/data"}}}),
        job(checkpoint={"volume": {"hostPath": {"path": "/data"}}}),
    ),
    ("spec.checkpoint.volume", job(checkpoint={"volume": {}}), job(checkpoint={})),
    (
        "spec.checkpoint.retain",
        job(checkpoint={"volume": {"emptyDir": {}}, "retain": True}),
        job(checkpoint={"size": "1Gi", "retain": True}),
    ),
    (
        "spec.faultInjection.faults",
        job(faultInjection={"faults": [{"class": "WorkerLost", "phase": "update", "step": 1}]}),
        job(faultInjection={"enabled": True, "faults": [{"class": "WorkerLost", "phase": "update", "step": 1}]}),
    ),
    (
        "spec.algorithm",
        job(rollout={"kvCacheDtype": "Fp8"}, algorithm={"importanceSampling": {"mode": "Disabled"}}),
        job(rollout={"kvCacheDtype": "Fp8"}, algorithm={"importanceSampling": {"mode": "Mask"}}),
    ),
    (
        "spec.algorithm",
        job(rollout={"quantization": "Fp8PerBlock"}, algorithm={"importanceSampling": {"mode": "Disabled"}}),
        job(algorithm={"importanceSampling": {"mode": "Disabled"}}),
    ),
    (
        "spec.rollout.quantization",
        job(policy={"gpusPerReplica": 0}, rollout={"quantization": "Fp8PerTensor"}),
        job(policy={"gpusPerReplica": 1}, rollout={"quantization": "Fp8PerTensor"}),
    ),
    (
        "spec.rollout.kvCacheDtype",
        job(policy={"gpusPerReplica": 0}, rollout={"gpusPerReplica": 0, "kvCacheDtype": "Fp8"}, **DISAGGREGATED),
        job(policy={"gpusPerReplica": 0}, rollout={"gpusPerReplica": 0, "kvCacheDtype": "Auto"}, **DISAGGREGATED),
    ),
    ("spec.recovery.maxGpus", job(recovery={"maxGpus": 2}, trainer=ANOTHER), job(recovery={"maxGpus": 2})),
    (
        "spec.recovery.maxGpus",
        job(recovery={"maxGpus": 8}, policy={"replicas": 2, "gpusPerReplica": 4}),
        job(recovery={"maxGpus": 16}, policy={"replicas": 2, "gpusPerReplica": 4}),
    ),
    ("spec.gang", job(queueName="gpus", gang="Volcano"), job(queueName="gpus", gang="Native")),
]


@pytest.mark.parametrize(("field", "invalid", "valid"), EXAMPLES)
def test_cel_and_python_report_the_same_conflict(field: str, invalid: dict[str, Any], valid: dict[str, Any]) -> None:
    assert [path for path, _ in told_by_cel(invalid)] == [field]
    assert told_by_python(invalid) == told_by_cel(invalid)
    assert told_by_cel(valid) == told_by_python(valid) == set()


def test_every_rule_has_an_example_that_breaks_it() -> None:
    written = {
        rule["message"]
        for path, part in parts(SCHEMA)
        for rule in part.get("x-kubernetes-validations", [])
        if "oldSelf" not in rule["rule"] and not path.startswith(".status")  # which people do not write
    }
    broken = {message for _, invalid, _ in EXAMPLES for _, message in told_by_cel(invalid)}
    assert written == broken


specs = st.fixed_dictionaries(
    {
        "topology": st.sampled_from(["Colocated", "Disaggregated"]),
        "policy": st.fixed_dictionaries(
            {}, optional={"gpusPerReplica": st.integers(0, 4), "replicas": st.integers(1, 4)}
        ),
        "recovery": st.fixed_dictionaries({}, optional={"maxGpus": st.integers(1, 20)}),
        "rollout": st.fixed_dictionaries(
            {},
            optional={
                "replicas": st.integers(1, 2),
                "gpusPerReplica": st.integers(0, 4),
                "tensorParallelSize": st.integers(1, 4),
                "template": st.just({}),
            },
        ),
        "memory": st.fixed_dictionaries({}, optional={"rolloutSleep": st.sampled_from(["Auto", "Disabled", "Level1"])}),
        "gang": st.sampled_from(["Auto", "Volcano"]),
        "algorithm": st.fixed_dictionaries(
            {},
            optional={
                "dualClip": st.sampled_from([0, 0.5, 3]),
                "warmupSteps": st.sampled_from([0, 101]),
                "promptsPerStep": st.sampled_from([1, 6, 12, 16]),
            },
        ),
    },
    optional={"queueName": st.just("gpus"), "trainer": st.just(ANOTHER)},
)


@given(specs)
def test_cel_and_python_agree_on_any_combination(spec: dict[str, Any]) -> None:
    """Python omits a conflict that follows from a field that another conflict names."""
    manifest = job(**spec)
    cel, python = told_by_cel(manifest), told_by_python(manifest)
    assert python <= cel
    assert {path.rpartition(".")[0] for path, _ in cel} == {path.rpartition(".")[0] for path, _ in python}


@pytest.mark.parametrize(
    ("section", "expected"),
    [("algorithm", {"steps", "maxPromptTokens"}), ("task", {"onRewardError", "rewardTimeoutSeconds"})],
)
def test_only_these_settings_may_change_on_an_existing_job(section: str, expected: set[str]) -> None:
    settings = SCHEMA["properties"]["spec"]["properties"][section]["properties"]
    changeable = {
        name
        for name, part in settings.items()
        if not any(rule["rule"] == "self == oldSelf" for rule in part.get("x-kubernetes-validations", []))
    }
    assert changeable == expected


def test_a_setting_of_the_task_can_be_neither_added_nor_removed() -> None:
    rules = SCHEMA["properties"]["spec"]["properties"]["task"]["x-kubernetes-validations"]
    same = [rule["rule"] for rule in rules if "oldSelf" in rule["rule"]]
    with_reward = {"name": "digits", "reward": "rewards:exact"}
    for old, new in ((with_reward, {"name": "digits"}), ({"name": "digits"}, with_reward)):
        assert not all(holds(rule, new, old) for rule in same)
    assert all(holds(rule, with_reward, with_reward) for rule in same)


@pytest.mark.parametrize(
    ("overlong", "old", "new", "allowed"),
    [("Fail", 8, 16, True), ("Fail", 8, 4, False), ("Skip", 8, 8, True), ("Skip", 8, 16, False)],
)
def test_the_prompt_limit_can_be_raised_unless_longer_prompts_are_skipped(
    overlong: str, old: int, new: int, allowed: bool
) -> None:
    spec = SCHEMA["properties"]["spec"]
    limit = spec["properties"]["algorithm"]["properties"]["maxPromptTokens"]["x-kubernetes-validations"]
    same_prompts = [rule for rule in spec["x-kubernetes-validations"] if "oldSelf.algorithm" in rule["rule"]]
    assert same_prompts

    def spec_with(tokens: int) -> dict[str, Any]:
        return {"task": {"overlongPrompts": overlong}, "algorithm": {"maxPromptTokens": tokens}}

    held = [holds(rule["rule"], new, old) for rule in limit]
    held += [holds(rule["rule"], spec_with(new), spec_with(old)) for rule in same_prompts]
    assert all(held) is allowed


@pytest.mark.parametrize(
    ("old", "new", "allowed"),
    [
        ({}, {}, True),
        ({}, {"replicas": 2}, False),
        ({"replicas": 2}, {}, False),
        ({"replicas": 2}, {"replicas": 2}, True),
    ],
)
def test_an_immutable_optional_field_cannot_be_added_or_removed(
    old: dict[str, int], new: dict[str, int], allowed: bool
) -> None:
    rollout = SCHEMA["properties"]["spec"]["properties"]["rollout"]
    rules = [rule["rule"] for rule in rollout["x-kubernetes-validations"] if "oldSelf" in rule["rule"]]
    assert all(holds(rule, new, old) for rule in rules) is allowed


@pytest.mark.parametrize(
    ("old", "new", "allowed"),
    [
        ({}, {"trainer": {"image": "verl:1"}}, False),
        ({"trainer": {"image": "verl:1"}}, {}, False),
        ({"trainer": {"image": "verl:1"}}, {"trainer": {"image": "verl:2"}}, True),
    ],
)
def test_a_job_keeps_its_kind_of_trainer(old: dict[str, Any], new: dict[str, Any], allowed: bool) -> None:
    rules = SCHEMA["properties"]["spec"]["x-kubernetes-validations"]
    assert all(holds(rule["rule"], new, old) for rule in rules if "oldSelf.trainer" in rule["rule"]) is allowed


@pytest.mark.parametrize(("name", "valid"), [("a" * 48, True), ("a" * 49, False), ("1st", False), ("a.b", False)])
def test_the_api_server_refuses_the_names_that_python_refuses(name: str, valid: bool) -> None:
    rules = [
        {"rule": "size(self.metadata.name) <= 48"},
        {"rule": "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')"},
    ]
    manifest = job() | {"metadata": {"name": name}}
    assert all(holds(rule["rule"], manifest) for rule in rules) is valid
    assert (all_errors(manifest) == []) is valid
