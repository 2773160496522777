"""RLJob: defaults, the same here as at the API server, columns of kubectl, and the JSON schema for editors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from rljob_api.custom_resource import rljob_definition
from rljob_api.generate import generated_files
from rljob_api.job import RLJob
from rljob_api.memory_plan import MemorySettings
from rljob_api.schemas import structural_schema
from rljob_api.step_report import StepReport
from tests.unit.api.api_server import parts, with_defaults

VERSION = rljob_definition()["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]
COLUMNS = VERSION["additionalPrinterColumns"]


def test_model_task_and_steps_make_a_job(smallest: dict[str, Any]) -> None:
    spec = RLJob.model_validate(smallest).spec
    assert spec.topology == "Colocated"
    assert (spec.algorithm.group_size, spec.algorithm.prompts_per_step, spec.algorithm.learning_rate) == (8, 16, 1e-6)
    assert (spec.recovery.max_adjustments, spec.recovery.max_restarts) == (6, 3)
    assert spec.memory == MemorySettings()


@pytest.mark.parametrize("missing", ["model", "task", "algorithm", "steps"])
def test_a_job_without_model_task_or_steps_is_invalid(smallest: dict[str, Any], missing: str) -> None:
    smallest["spec"].pop(missing, None)
    smallest["spec"].get("algorithm", {}).pop(missing, None)
    with pytest.raises(ValueError, match=missing):
        RLJob.model_validate(smallest)


def test_the_api_server_sets_the_same_defaults_as_pydantic(smallest: dict[str, Any]) -> None:
    filled = with_defaults(smallest, structural_schema(RLJob))
    assert RLJob.model_validate(filled) == RLJob.model_validate(smallest)
    expected = RLJob.model_validate(smallest).model_dump(mode="json", by_alias=True, exclude_none=True)["spec"]
    assert expected.keys() <= filled["spec"].keys()
    assert filled["spec"]["algorithm"] == expected["algorithm"]
    assert filled["spec"]["memory"] == expected["memory"]


def test_a_job_survives_a_json_round_trip_and_null_counts_as_absent(smallest: dict[str, Any]) -> None:
    memory = {"kvCache": "4Gi", "microBatchTokens": 8192, "emptyCache": "Enabled"}
    smallest["spec"] |= {"memory": memory, "policy": {"replicas": None}}
    job = RLJob.model_validate(smallest | {"spec": smallest["spec"] | {"trainer": None}})
    assert (job.spec.memory.kv_cache, job.spec.policy.replicas) == (4 << 30, 1)
    assert RLJob.model_validate_json(job.model_dump_json(by_alias=True)) == job


def test_a_job_read_from_an_api_server_is_valid(smallest: dict[str, Any]) -> None:
    time = "2026-11-21T13:00:00Z"
    metadata = {"uid": "5a7b", "resourceVersion": "12", "creationTimestamp": time, "managedFields": [{}]}
    diagnosis = {"class": "ActivationSpike", "confidence": 0.9, "message": "61 of 80 GiB in activations"}
    condition = {"type": "Complete", "status": "True", "reason": "R", "message": "", "lastTransitionTime": time}
    attempt = {"number": 1, "planGeneration": 1, "startTime": time, "fromStep": 1, "diagnosis": diagnosis}
    status = {"step": 3, "conditions": [condition], "attempts": [attempt]}
    read = RLJob.model_validate(smallest | {"metadata": smallest["metadata"] | metadata, "status": status}).status
    assert read is not None
    assert read.model_dump(by_alias=True)["attempts"][0]["diagnosis"]["class"] == "ActivationSpike"


def test_get_rlj_prints_columns_from_fields_that_exist() -> None:
    names = {wide: [c["name"] for c in COLUMNS if bool(c.get("priority")) is wide] for wide in (False, True)}
    assert names[False] == ["Phase", "Step", "Reward", "Peak", "Headroom", "Adjustments", "Last-OOM", "Age"]
    assert names[True] == ["Restarts", "Evaluation", "Ready", "Message"]
    types = {path: part.get("type") for path, part in parts(SCHEMA)}
    for column in COLUMNS:
        if "[" not in column["jsonPath"] and column["name"] != "Age":
            assert types[column["jsonPath"]] == column["type"]


def test_the_json_schema_has_exactly_the_fields_of_the_spec() -> None:
    schema = json.loads(generated_files()["crds/schema/rljob.schema.json"])
    assert schema["required"] == ["apiVersion", "kind", "metadata", "spec"]
    assert schema["properties"]["spec"]["additionalProperties"] is False
    assert "x-kubernetes" not in json.dumps(schema)
    assert "status" not in schema["properties"]
    editor, kubernetes = (dict(parts(each["properties"]["spec"])).keys() for each in (schema, SCHEMA))
    assert editor == kubernetes


KNOWN_TO_THE_API_SERVER = {
    *("type", "properties", "items", "additionalProperties", "required", "description", "default", "enum", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "pattern", "multipleOf"),
    *("minItems", "maxItems", "uniqueItems", "minProperties", "maxProperties", "anyOf", "allOf", "oneOf", "not"),
    *("nullable", "title", "example"),
}
"""JSONSchemaProps of apiextensions.k8s.io/v1; it refuses others."""


@pytest.mark.parametrize("model", [RLJob, StepReport])
def test_the_schema_has_only_what_the_api_server_knows(model: type[BaseModel]) -> None:
    def unknown(schema: dict[str, Any]) -> set[str]:
        below = [*schema.get("properties", {}).values(), *schema.get("anyOf", ())]
        below += [schema[name] for name in ("items", "additionalProperties") if name in schema]
        here = {key for key in schema if not key.startswith("x-kubernetes-")} - KNOWN_TO_THE_API_SERVER
        return here.union(*map(unknown, below))

    assert unknown(structural_schema(model)) == set()
