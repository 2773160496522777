"""Rules between fields exist twice, in CEL and in Python, and must agree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.custom_resource import rljob_definition
from rljob_api.job import RLJob
from rljob_api.manifest import dotted
from rljob_api.manifest.problems import checked
from rljob_api.roles import RolloutSpec
from rljob_api.schemas import structural_schema
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


def cel_errors(manifest: dict[str, Any]) -> set[tuple[str, str]]:
    return broken_rules(with_defaults(manifest, SCHEMA), SCHEMA)


def python_errors(manifest: dict[str, Any]) -> set[tuple[str, str]]:
    return {(dotted(error["loc"]), error["msg"]) for error in checked(manifest).errors}


EXAMPLES = yaml.safe_load(Path(__file__).with_name("rules.yaml").read_text())


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example["field"])
def test_cel_and_python_report_the_same_conflict(example: dict[str, Any]) -> None:
    invalid, valid = job(**example["invalid"]), job(**example["valid"])
    assert [path for path, _ in cel_errors(invalid)] == [f"spec.{example['field']}"]
    assert python_errors(invalid) == cel_errors(invalid)
    assert cel_errors(valid) == python_errors(valid) == set()


def test_every_rule_has_an_example_that_breaks_it() -> None:
    written = {
        rule["message"]
        for path, part in parts(SCHEMA)
        for rule in part.get("x-kubernetes-validations", [])
        if "oldSelf" not in rule["rule"] and not path.startswith(".status")  # which people do not write
    }
    broken = {message for example in EXAMPLES for _, message in cel_errors(job(**example["invalid"]))}
    assert written == broken


def test_a_rule_that_reads_one_field_is_attached_to_that_field() -> None:
    """Each field that a rule reads through its object costs the API server copies of the object's schema."""
    reading_one = [
        (path, rule["rule"])
        for path, part in parts(SCHEMA)
        for rule in part.get("x-kubernetes-validations", [])
        if len(set(re.findall(r"self\.\w+\b(?!\()", rule["rule"]))) == 1
        and not re.search(r"has\(self|oldSelf|self\.metadata", rule["rule"])
    ]
    assert reading_one == []


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
                "tensorParallelSize": st.sampled_from(["Auto", 1, 2, 3, 4]),
                "template": st.just({}),
            },
        ),
        "memory": st.fixed_dictionaries({}, optional={"rolloutSleep": st.sampled_from(["Auto", "Disabled", "Level1"])}),
        "gang": st.sampled_from(["Auto", "Volcano"]),
        "algorithm": st.fixed_dictionaries(
            {},
            optional={
                "name": st.sampled_from(["grpo", "gspo", "cispo"]),
                "dualClip": st.sampled_from([0, 0.5, 3]),
                "warmupSteps": st.sampled_from([0, 101]),
                "promptsPerStep": st.sampled_from([1, 6, 12, 16]),
            },
        ),
    },
    optional={"queueName": st.just("gpus"), "trainer": st.just({"image": "trainer:1"})},
)


@given(specs)
def test_cel_and_python_agree_on_any_combination(spec: dict[str, Any]) -> None:
    """Python omits a conflict that follows from a field that another conflict names."""
    manifest = job(**spec)
    cel, python = cel_errors(manifest), python_errors(manifest)
    assert python <= cel
    assert {path.rpartition(".")[0] for path, _ in cel} == {path.rpartition(".")[0] for path, _ in python}


def test_the_api_server_stores_no_auto_that_an_older_version_would_refuse() -> None:
    size = SCHEMA["properties"]["spec"]["properties"]["rollout"]["properties"]["tensorParallelSize"]
    assert "default" not in size
    assert RolloutSpec().tensor_parallel_size == "Auto"


def test_only_these_settings_may_change_on_an_existing_job() -> None:
    changeable = {
        f"{section}.{name}"
        for section in ("algorithm", "task")
        for name, part in SCHEMA["properties"]["spec"]["properties"][section]["properties"].items()
        if not any(rule["rule"] == "self == oldSelf" for rule in part.get("x-kubernetes-validations", []))
    }
    assert changeable == {
        "algorithm.steps",
        "algorithm.maxPromptTokens",
        "task.onRewardError",
        "task.rewardTimeoutSeconds",
    }


def may_change(old: Any, new: Any, schema: dict[str, Any]) -> bool:
    """Return True if all rules about changes hold for a value and, in objects, for its fields."""
    rules = [rule["rule"] for rule in schema.get("x-kubernetes-validations", []) if "oldSelf" in rule["rule"]]
    below = schema.get("properties", {})
    fields = [name for name in below if isinstance(old, dict) and name in old and name in new]
    return all(holds(rule, new, old) for rule in rules) and all(
        may_change(old[name], new[name], below[name]) for name in fields
    )


REWARD = {"task": {"reward": "rewards:exact"}}
TWO = {"rollout": {"replicas": 2}, "topology": "Disaggregated"}
ONE = {"rollout": {}, "topology": "Disaggregated"}


def steps(number: int, schedule: str = "constant", **others: Any) -> dict[str, Any]:
    return {"algorithm": {"steps": number, "learningRateSchedule": {"name": schedule}, **others}}


def prompts(tokens: int, overlong: str) -> dict[str, Any]:
    return {"algorithm": {"maxPromptTokens": tokens}, "task": {"overlongPrompts": overlong}}


@pytest.mark.parametrize(
    ("old", "new", "allowed"),
    [
        ({}, {}, True),
        (REWARD, REWARD, True),
        (REWARD, {}, False),  # a setting of the task can be neither added nor removed
        ({}, REWARD, False),
        (TWO, TWO, True),
        (ONE, TWO, False),  # nor can an optional field
        (TWO, ONE, False),
        ({}, {"trainer": {"image": "verl:1"}}, False),  # a job keeps its kind of trainer
        ({"trainer": {"image": "verl:1"}}, {}, False),
        ({"trainer": {"image": "verl:1"}}, {"trainer": {"image": "verl:2"}}, True),
        (steps(5, "inverse_sqrt"), steps(9, "inverse_sqrt"), True),
        (steps(5, "cosine"), steps(5, "cosine"), True),
        (steps(5, "cosine"), steps(9, "cosine"), False),  # it would change the rates of the steps before
        (steps(5), steps(5, clipHigh=0.28), False),
        (steps(5, loss="own:loss"), steps(5), False),
        (prompts(8, "Fail"), prompts(16, "Fail"), True),
        (prompts(8, "Fail"), prompts(4, "Fail"), False),
        (prompts(8, "Skip"), prompts(8, "Skip"), True),
        (prompts(8, "Skip"), prompts(16, "Skip"), False),  # other prompts would be skipped
        ({}, {"evaluation": {"task": {"name": "digits"}}}, True),
        ({}, {"evaluation": {"heldOut": 2}}, False),  # other prompts would be trained on
        ({"evaluation": {"heldOut": 2}}, {"evaluation": {"heldOut": 2, "everySteps": 5}}, True),
        ({"evaluation": {"heldOut": 2}}, {"evaluation": {"heldOut": 3}}, False),
    ],
)
def test_the_api_server_refuses_changes_that_a_job_does_not_survive(
    old: dict[str, Any], new: dict[str, Any], allowed: bool
) -> None:
    before, after = (with_defaults(job(**spec), SCHEMA) for spec in (old, new))
    assert may_change(before, after, SCHEMA) is allowed


@pytest.mark.parametrize(("name", "valid"), [("a" * 48, True), ("a" * 49, False), ("1st", False), ("a.b", False)])
def test_the_api_server_refuses_the_names_that_python_refuses(name: str, valid: bool) -> None:
    schema = rljob_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    manifest = job() | {"metadata": {"name": name}}
    assert (broken_rules(with_defaults(manifest, schema), schema) == set()) is valid
    assert (checked(manifest).errors == []) is valid
