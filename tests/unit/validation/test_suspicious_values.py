"""Values that are valid and probably a mistake."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.job import RLJob
from rljob_api.manifest import dotted, load_manifest
from rljob_testing.repository import EXAMPLES
from rljob_trainer.validation.suspicious_values import suspicious_values

LORA: dict[str, Any] = {"policy": {"lora": {}}}


def warnings(**spec: Any) -> dict[str, str]:
    algorithm = {"steps": 20} | spec.pop("algorithm", {})
    data = {
        "metadata": {"name": "job"},
        "spec": {"model": {"uri": "hf://org/name"}, "task": {"name": "digits"}, "algorithm": algorithm, **spec},
    }
    job = RLJob.model_validate(data, by_alias=True, by_name=False)
    return {dotted(finding.field): finding.message for finding in suspicious_values(job, data)}


@pytest.mark.parametrize(
    ("spec", "field", "message"),
    [
        ({"memory": {"kvCache": 1}}, "memory.kvCache", "did you mean 1Gi?"),
        ({"memory": {"kvCache": "0.9"}}, "memory.kvCache", "did you mean 0.9Gi?"),
        ({"recovery": {"maxHostMemory": "64"}}, "recovery.maxHostMemory", "did you mean 64Gi?"),
        ({"recovery": None}, "recovery", "has no value"),
        ({"memory": {"microBatchTokens": 10_000_000}}, "memory.microBatchTokens", "more than an update can have"),
        ({"memory": {"microBatchTokens": 100}}, "memory.microBatchTokens", "a prompt and a response can have (768"),
        ({"rollout": {"maxConcurrentSequences": 999}}, "rollout.maxConcurrentSequences", "has (128 responses)"),
        (
            {"algorithm": {"promptsPerStep": 3, "groupSize": 4, "updatesPerStep": 7}},
            "algorithm.updatesPerStep",
            "the 12 responses of a step (promptsPerStep x groupSize) are split into unequal parts of 1 or 2: write a "
            "divisor of 12, such as 6",
        ),
        ({"algorithm": {"groupSize": None}}, "algorithm.groupSize", "has no value: the default 8 applies"),
        (
            {"rollout": {"engineArgs": {"gpu_memory_utilization": 0.5}}},
            "rollout.engineArgs.gpu_memory_utilization",
            "has no effect on the KV cache",
        ),
        ({"algorithm": {"learningRate": 0.01}}, "algorithm.learningRate", "high for a pretrained model"),
        (
            LORA | {"algorithm": {"learningRate": 0.02}},
            "algorithm.learningRate",
            "0.02 is high for adapters of a pretr",
        ),
        ({"checkpoint": {"everySteps": 50}}, "checkpoint.everySteps", "no checkpoint is written before the end"),
        ({"checkpoint": {"volume": {"emptyDir": {}}}}, "checkpoint.volume", "deleted with its pod"),
        ({"env": [{"name": "HF_TOKEN", "value": "hf_x"}]}, "env[0].value", "in plain text"),
        (
            {"policy": {"template": {"spec": {"nodeselector": {}}}}},
            "policy.template.spec.nodeselector",
            "did you mean nodeSelector?",
        ),
    ],
)
def test_a_suspicious_value_is_questioned(spec: dict[str, Any], field: str, message: str) -> None:
    [(found, text)] = warnings(**spec).items()
    assert found == f"spec.{field}"
    assert message in text


@pytest.mark.parametrize(
    "spec",
    [
        {"memory": {"kvCache": "1Gi", "microBatchTokens": 4096}},
        {"memory": {"kvCache": 4294967296}},
        {"algorithm": {"learningRate": 0.003}, "model": {"uri": "random://qwen3"}},
        {"env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}]},
        {"algorithm": {"learningRate": 0.003}, "model": {"uri": "file:///models/tiny"}},
        LORA | {"algorithm": {"learningRate": 0.003}},
        {"rollout": {"engineArgs": {"seed_offset": None}}},
        {"env": [{"name": "HF_ENDPOINT", "value": "https://hub.example.com"}]},
    ],
)
def test_ordinary_values_are_not(spec: dict[str, Any]) -> None:
    assert warnings(**spec) == {}


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_no_example_is_suspicious(example: Any) -> None:
    job = load_manifest(example)
    data = {"spec": job.spec.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)}
    assert list(suspicious_values(job, data)) == []
