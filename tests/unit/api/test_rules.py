"""Rules between fields exist twice, in CEL and in Python, and must agree."""

from __future__ import annotations

from typing import Any

import pytest
from api_server import broken_rules, holds, parts, with_defaults
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.all_errors import all_errors
from rljob_api.job import RLJob
from rljob_api.manifest import dotted
from rljob_api.structural_schema import structural_schema

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

EXAMPLES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # the field that is named, an invalid job, a valid one beside it
    ("spec.algorithm.dualClip", job(algorithm={"dualClip": 1.0}), job(algorithm={"dualClip": 0.0})),
    ("spec.algorithm.warmupSteps", job(algorithm={"warmupSteps": 101}), job(algorithm={"warmupSteps": 100})),
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
        job(policy={"gpusPerReplica": 4}, rollout={"tensorParallelSize": 3}),
        job(policy={"gpusPerReplica": 4}, rollout={"tensorParallelSize": 2}),
    ),
    (
        "spec.rollout.tensorParallelSize",
        job(policy={"gpusPerReplica": 4}, rollout={"tensorParallelSize": 2}, **DISAGGREGATED),
        job(rollout={"gpusPerReplica": 2, "tensorParallelSize": 2}, **DISAGGREGATED),
    ),
    (
        "spec.checkpoint.volume",
        job(checkpoint={"volume": {"emptyDir": {}}, "size": "1Gi"}),
        job(checkpoint={"size": "1Gi", "storageClassName": "fast"}),
    ),
    (
        "spec.faultInjection.faults",
        job(faultInjection={"faults": [{"class": "WorkerLost", "phase": "update", "step": 1}]}),
        job(faultInjection={"enabled": True, "faults": [{"class": "WorkerLost", "phase": "update", "step": 1}]}),
    ),
    ("spec.gang", job(queueName="gpus", gang="Volcano"), job(queueName="gpus", gang="Native")),
]


@pytest.mark.parametrize(("field", "invalid", "valid"), EXAMPLES)
def test_cel_and_python_report_the_same_conflict(field: str, invalid: dict[str, Any], valid: dict[str, Any]) -> None:
    assert [path for path, _ in told_by_cel(invalid)] == [field]
    assert told_by_python(invalid) == told_by_cel(invalid)
    assert told_by_cel(valid) == told_by_python(valid) == set()


def test_every_rule_has_an_example_that_breaks_it() -> None:
    rules = [rule for _, part in parts(SCHEMA) for rule in part.get("x-kubernetes-validations", [])]
    written = {rule["message"] for rule in rules if "oldSelf" not in rule["rule"]}
    broken = {message for _, invalid, _ in EXAMPLES for _, message in told_by_cel(invalid)}
    assert written == broken


specs = st.fixed_dictionaries(
    {
        "topology": st.sampled_from(["Colocated", "Disaggregated"]),
        "policy": st.fixed_dictionaries({}, optional={"gpusPerReplica": st.integers(0, 4)}),
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
            {}, optional={"dualClip": st.sampled_from([0, 0.5, 3]), "warmupSteps": st.sampled_from([0, 101])}
        ),
    },
    optional={"queueName": st.just("gpus")},
)


@given(specs)
def test_cel_and_python_agree_on_any_combination(spec: dict[str, Any]) -> None:
    """Python omits a conflict that follows from a field that another conflict names."""
    manifest = job(**spec)
    cel, python = told_by_cel(manifest), told_by_python(manifest)
    assert python <= cel
    assert {path.rpartition(".")[0] for path, _ in cel} == {path.rpartition(".")[0] for path, _ in python}


def test_only_steps_and_prompt_limit_may_change_on_an_existing_job() -> None:
    algorithm = SCHEMA["properties"]["spec"]["properties"]["algorithm"]["properties"]
    changeable = {
        name
        for name, part in algorithm.items()
        if not any(rule["rule"] == "self == oldSelf" for rule in part.get("x-kubernetes-validations", []))
    }
    assert changeable == {"steps", "maxPromptTokens"}


@pytest.mark.parametrize(
    ("overlong", "old", "new", "allowed"),
    [("Fail", 8, 16, True), ("Fail", 8, 4, False), ("Skip", 8, 8, True), ("Skip", 8, 16, False)],
)
def test_the_prompt_limit_can_be_raised_unless_longer_prompts_are_skipped(
    overlong: str, old: int, new: int, allowed: bool
) -> None:
    spec = SCHEMA["properties"]["spec"]
    limit = spec["properties"]["algorithm"]["properties"]["maxPromptTokens"]["x-kubernetes-validations"]
    same_prompts = [rule for rule in spec["x-kubernetes-validations"] if "oldSelf" in rule["rule"]]
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


@pytest.mark.parametrize(("name", "valid"), [("a" * 48, True), ("a" * 49, False), ("1st", False), ("a.b", False)])
def test_the_api_server_refuses_the_names_that_python_refuses(name: str, valid: bool) -> None:
    rules = [
        {"rule": "size(self.metadata.name) <= 48"},
        {"rule": "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')"},
    ]
    manifest = job() | {"metadata": {"name": name}}
    assert all(holds(rule["rule"], manifest) for rule in rules) is valid
    assert (all_errors(manifest) == []) is valid
