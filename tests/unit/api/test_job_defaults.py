"""Model, task and steps make a job; everything else has a default, the same here as at the API server."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from rljob_api.inlined_schema import inlined_schema
from rljob_api.job import RLJob
from rljob_api.memory_settings import MemorySettings
from rljob_api.step_report import StepReport
from rljob_api.structural_schema import structural_schema
from tests.unit.api.api_server import with_defaults


def test_model_task_and_steps_make_a_job(smallest: dict[str, Any]) -> None:
    spec = RLJob.model_validate(smallest).spec
    assert spec.topology == "Colocated"
    assert (spec.algorithm.group_size, spec.algorithm.prompts_per_step, spec.algorithm.learning_rate) == (8, 16, 1e-6)
    assert (spec.recovery.max_adjustments, spec.recovery.max_restarts) == (6, 3)
    assert spec.memory == MemorySettings()


@pytest.mark.parametrize("missing", [("model",), ("task",), ("algorithm",), ("algorithm", "steps")])
def test_a_job_without_model_task_or_steps_is_invalid(smallest: dict[str, Any], missing: tuple[str, ...]) -> None:
    around = smallest["spec"]
    for name in missing[:-1]:
        around = around[name]
    del around[missing[-1]]
    with pytest.raises(ValueError, match=missing[-1]):
        RLJob.model_validate(smallest)


def test_the_api_server_sets_the_same_defaults_as_pydantic(smallest: dict[str, Any]) -> None:
    filled = with_defaults(smallest, structural_schema(RLJob))
    assert RLJob.model_validate(filled) == RLJob.model_validate(smallest)
    expected = RLJob.model_validate(smallest).model_dump(mode="json", by_alias=True, exclude_none=True)["spec"]
    assert {name for name in expected if name not in filled["spec"]} == set()
    assert filled["spec"]["algorithm"] == expected["algorithm"]
    assert filled["spec"]["memory"] == expected["memory"]


def test_a_field_that_is_null_counts_as_absent(smallest: dict[str, Any]) -> None:
    smallest["spec"] |= {"memory": None, "trainer": None, "policy": {"replicas": None}}
    assert RLJob.model_validate(smallest).spec.policy.replicas == 1


def test_a_job_survives_a_json_round_trip(smallest: dict[str, Any]) -> None:
    smallest["spec"]["memory"] = {"kvCache": "4Gi", "microBatchTokens": 8192, "emptyCache": "Enabled"}
    job = RLJob.model_validate(smallest)
    assert job.spec.memory.kv_cache == 4 << 30
    assert RLJob.model_validate_json(job.model_dump_json(by_alias=True)) == job


def test_a_job_read_from_an_api_server_is_valid(smallest: dict[str, Any]) -> None:
    smallest["metadata"] |= {
        "uid": "5a7b",
        "resourceVersion": "12",
        "generation": 2,
        "creationTimestamp": "2026-11-21T13:00:00Z",
        "managedFields": [{"manager": "kubectl"}],
    }
    smallest["status"] = {
        "step": 3,
        "conditions": [
            {
                "type": "Complete",
                "status": "True",
                "reason": "AllStepsCommitted",
                "message": "3 of 3 steps",
                "lastTransitionTime": "2026-11-21T13:05:00Z",
            }
        ],
        "attempts": [
            {
                "number": 1,
                "planGeneration": 1,
                "startTime": "2026-11-21T13:00:00Z",
                "fromStep": 1,
                "diagnosis": {"class": "ActivationSpike", "confidence": 0.9, "message": "61 of 80 GiB in activations"},
            }
        ],
    }
    status = RLJob.model_validate(smallest).status
    assert status is not None
    assert status.attempts[0].diagnosis is not None
    assert status.attempts[0].diagnosis.class_name == "ActivationSpike"
    assert status.model_dump(by_alias=True)["attempts"][0]["diagnosis"]["class"] == "ActivationSpike"


@pytest.mark.parametrize("kind", [RLJob, StepReport])
def test_every_field_is_described_in_a_sentence(kind: type[BaseModel]) -> None:
    def undescribed(schema: dict[str, Any], path: str = "") -> list[str]:
        below = [
            name
            for field, part in schema.get("properties", {}).items()
            for name in undescribed(part, f"{path}.{field}")
        ]
        return ([] if schema.get("description", "").endswith((".", "…")) else [path]) + below

    assert undescribed(inlined_schema(kind)) == []
