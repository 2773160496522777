"""No field of the spec is ignored silently: by `rljob run`, by another trainer, or by a job of another kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from rljob_api.job import RLJob
from rljob_api.manifest import dotted, only_job
from rljob_api.manifest.unread_fields import _INEFFECTIVE, READERS, unread_fields
from rljob_api.schemas import Schema, inlined_schema
from rljob_testing.repository import EXAMPLES

_WHOLE = ("model.cache", "task.answer", "task.files", "evaluation.task", "policy.lora", "trainer")
"""Objects that a command reads as a whole, or not at all."""


def leaves(schema: Schema, prefix: str = "") -> Iterator[str]:
    for name, below in schema.get("properties", {}).items():
        whole = f"{prefix}{name}"
        if below.get("properties") and whole not in _WHOLE and name != "template":
            yield from leaves(below, f"{whole}.")
        else:
            yield whole


def unread(device: Literal["cpu", "cuda"] | None = None, **spec: Any) -> dict[str, str]:
    written = {"model": {"uri": "hf://org/name"}, "task": {"name": "digits"}, "algorithm": {"steps": 20}} | spec
    job = RLJob.model_validate({"metadata": {"name": "job"}, "spec": written}, by_alias=True, by_name=False)
    found = unread_fields(job.spec, written, device)
    return {dotted(each.field).removeprefix("spec."): f"{each.severity}: {each.message}" for each in found}


def test_every_field_of_the_spec_is_in_the_table_once() -> None:
    listed = [field for fields, _, _ in READERS for field in fields.split()]
    assert sorted(listed) == sorted(leaves(inlined_schema(RLJob)["properties"]["spec"]))
    assert {field for row in _INEFFECTIVE for field in row.fields.split()} <= set(listed)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("env: [{name: A, value: b}]", "env: note: rljob run ignores it: set the variables in the shell"),
        ("policy: {template: {spec: {a: b}}}", "policy.template: note: rljob run ignores it: it is for pods"),
        ("controller: {template: {spec: {a: b}}}", "controller.template: note: rljob run ignores it"),
        ("suspend: true", "suspend: note: rljob run ignores it"),
        ("queueName: gpus", "queueName: note: rljob run ignores it"),
        ("queueName: gpus, gang: Native", "gang: warning: has no effect with queueName"),
        ("checkpoint: {size: 1Gi}", "checkpoint.size: note: rljob run ignores it and writes to its output"),
        ("recovery: {maxHostMemory: 1Gi}", "recovery.maxHostMemory: note: rljob run cannot add memory"),
        (
            "memory: {mode: Disabled}, recovery: {maxAdjustments: 3}",
            "recovery.maxAdjustments: warning: has no effect with memory.mode: Disabled",
        ),
        (
            "memory: {policyOffload: Enabled}, topology: Disaggregated",
            "memory.policyOffload: warning: has no effect with topology",
        ),
        (
            "memory: {emptyCache: Enabled}, policy: {gpusPerReplica: 0}",
            "memory.emptyCache: warning: has no effect without GPUs",
        ),
        (
            "algorithm: {steps: 9, importanceSampling: {mode: Disabled, cap: 3.0}}",
            "algorithm.importanceSampling.cap: warning:",
        ),
        (
            "algorithm: {steps: 9, importanceSampling: {mode: Disabled, level: Sequence}}",
            "algorithm.importanceSampling.level: warning: has no effect with importanceSampling.mode: Disabled",
        ),
        ("algorithm: {steps: 9, clipHigh: 0.3}", "algorithm.clipHigh: note: has no effect with updatesPerStep: 1"),
        ("task: {name: digits, answer: {pattern: '(.)'}}", "task.answer: warning: has no effect"),
        ("task: {name: digits, files: {configMap: a}}", "task.files: warning: has no effect"),
        (
            "task: {name: digits, files: {configMap: a}}, algorithm: {steps: 9, loss: 'own:loss'}",
            "task.files: note: rljob run ignores it and looks next to the manifest",
        ),
        (
            "task: {name: digits, chatTemplate: Never, chatTemplateArgs: {a: 1}}",
            "task.chatTemplateArgs: warning: has no effect with chatTemplate: Never",
        ),
        (
            "model: {uri: 'pvc://a/b', cache: {persistentVolumeClaim: c}}",
            "model.cache: warning: has no effect: only hf://",
        ),
        (
            "trainer: {image: 'trl:1'}, controller: {template: {spec: {a: b}}}",
            "controller.template: warning: has no effect",
        ),
        (
            "trainer: {image: 'trl:1'}, rollout: {replicas: 2}, topology: Disaggregated",
            "rollout.replicas: warning: has no",
        ),
        ("trainer: {image: 'trl:1'}, memory: {kvCache: 1Gi}", "memory.kvCache: warning: has no effect on another"),
        (
            "trainer: {image: 'trl:1'}, memory: {emptyCache: Enabled}",
            "memory.emptyCache: warning: has no effect: add emptyCache to",
        ),
        (
            "trainer: {image: 'trl:1'}, faultInjection: {enabled: true}",
            "faultInjection.enabled: warning: has no effect",
        ),
    ],
)
def test_a_field_that_is_not_read_is_reported(spec: str, message: str) -> None:
    field, found = next(iter(unread(**yaml.safe_load(f"{{{spec}}}")).items()))
    assert f"{field}: {found}".startswith(message)


@pytest.mark.parametrize(
    "spec",
    [
        "suspend: false, retry: 0, gang: Auto, env: null, memory: {emptyCache: Auto}",
        "algorithm: {steps: 9, clipHigh: 0.3, updatesPerStep: 2}",
        "trainer: {image: 'trl:1', adapter: TRL}, memory: {kvCache: 1Gi}",
        "trainer: {image: 'trl:1'}, env: [{name: A, value: b}], policy: {template: {spec: {a: b}}}",
        "task: {name: digits, reward: 'rw:f', answer: {pattern: '(.)'}}",
    ],
)
def test_a_field_that_is_read_or_has_its_default_is_not(spec: str) -> None:
    assert unread(**yaml.safe_load(f"{{{spec}}}")) == {}


def test_a_run_reports_settings_that_its_device_does_not_have() -> None:
    eight = {"policy": {"gpusPerReplica": 8}, "memory": {"optimizerOffload": "Enabled"}}
    assert unread("cuda", **eight) == {}
    assert unread("cpu", **eight) == {
        "policy.gpusPerReplica": "note: no GPU is used here: each of them is a rank on the CPU",
        "memory.optimizerOffload": "warning: has no effect without GPUs: the optimizer's state is in host memory",
    }
    assert list(unread("cuda", policy={"gpusPerReplica": 0})) == ["policy.gpusPerReplica"]


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_no_field_of_an_example_is_without_effect(example: Path) -> None:
    document = only_job(example)
    found = unread_fields(document.load().spec, document.document.data["spec"])
    assert [each for each in found if each.severity == "warning"] == []
