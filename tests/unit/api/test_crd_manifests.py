"""The CRDs are structural schemas, and the generated files agree with the types."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rljob_api.custom_resource import rljob_definition, step_report_definition
from rljob_api.generate import generated_files
from tests.unit.api.api_server import parts

DEFINITIONS = [rljob_definition(), step_report_definition()]
KEYWORDS = {
    *("type", "description", "default", "enum", "format", "pattern", "nullable", "properties", "required", "items"),
    *("additionalProperties", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "anyOf"),
    *("minLength", "maxLength", "minItems", "maxItems", "maxProperties"),
    *("x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields", "x-kubernetes-validations"),
    *("x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-map-type"),
}


def schema_of(definition: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


ALL_PARTS = [pair for definition in DEFINITIONS for pair in parts(schema_of(definition))]


def test_the_schemas_are_structural() -> None:
    for path, part in ALL_PARTS:
        assert set(part) <= KEYWORDS, path
        int_or_string = part.get("x-kubernetes-int-or-string", False)
        assert ("type" in part) != int_or_string, f"{path}: a type, or x-kubernetes-int-or-string, and not both"
        assert part.get("anyOf", []) == ([{"type": "integer"}, {"type": "string"}] if int_or_string else []), path
        assert not {"properties", "additionalProperties"} <= set(part), path
        assert set(part.get("required", [])) <= set(part.get("properties", {})), path
        assert ("items" in part) == (part.get("type") == "array"), path
        assert all(isinstance(part.get(flag, True), bool) for flag in ("exclusiveMinimum", "exclusiveMaximum")), path
        if part.get("type") == "object" and path != ".metadata":
            assert {"properties", "additionalProperties", "x-kubernetes-preserve-unknown-fields"} & set(part), path


def test_lists_and_strings_that_rules_read_are_bounded() -> None:
    """The API server estimates the cost of a rule from these bounds, and refuses a CRD with a costly one."""
    for path, part in ALL_PARTS:
        if part.get("type") == "array":
            assert "maxItems" in part, path
            keys = part.get("x-kubernetes-list-map-keys", [])
            assert set(keys) <= set(part["items"].get("required", [])), f"{path}: keys are required or have a default"
        if part.get("type") == "string" and path.startswith(".spec"):
            assert {"maxLength", "enum"} & set(part), path


def test_rules_name_fields_that_exist() -> None:
    for _, part in ALL_PARTS:
        for rule in part.get("x-kubernetes-validations", []):
            below = part
            for name in rule.get("fieldPath", "").split(".")[1:]:
                below = below["properties"][name]
            for name in re.findall(r"\bself\.(\w+)", rule["rule"]):
                assert name in part["properties"]


def test_the_root_has_the_fields_that_the_api_server_requires() -> None:
    for definition in DEFINITIONS:
        schema = schema_of(definition)
        assert schema["type"] == "object"
        assert schema["properties"]["metadata"] == {"type": "object"}
        assert schema["properties"]["kind"]["type"] == "string"
        names = definition["spec"]["names"]
        assert definition["metadata"]["name"] == f"{names['plural']}.{definition['spec']['group']}"


def test_get_rlj_prints_the_columns_of_the_design_from_fields_that_exist() -> None:
    columns = DEFINITIONS[0]["spec"]["versions"][0]["additionalPrinterColumns"]
    names = [column["name"] for column in columns if not column.get("priority")]
    assert names == ["Phase", "Step", "Reward", "Peak", "Headroom", "Adjustments", "Last-OOM", "Age"]
    assert [column["name"] for column in columns if column.get("priority")] == ["Restarts", "Ready", "Message"]
    types = {path: part.get("type") for path, part in parts(schema_of(DEFINITIONS[0]))}
    for column in columns:
        if "[" in column["jsonPath"] or column["name"] == "Age":
            continue
        assert types[column["jsonPath"]] == column["type"]
    assert DEFINITIONS[0]["spec"]["names"]["shortNames"] == ["rlj"]
    assert DEFINITIONS[0]["spec"]["names"]["categories"] == ["all"]
    assert DEFINITIONS[0]["spec"]["versions"][0]["subresources"] == {"status": {}}


def test_generation_is_the_same_in_another_process() -> None:
    check = [sys.executable, "-m", "rljob_api.generate", "--check"]
    result = subprocess.run(check, capture_output=True, text=True, env={"PYTHONHASHSEED": "7"}, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_check_names_a_stale_file_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rljob_api import generate

    monkeypatch.setattr(generate, "REPOSITORY", tmp_path)
    monkeypatch.setattr(sys, "argv", ["generate", "--check"])
    assert generate.main() == 1
    assert not (tmp_path / "crds").exists()


def test_the_json_schema_has_exactly_the_fields_of_the_spec() -> None:
    schema = json.loads(generated_files()["crds/schema/rljob.schema.json"])
    assert schema["required"] == ["apiVersion", "kind", "metadata", "spec"]
    assert schema["properties"]["spec"]["additionalProperties"] is False
    assert "x-kubernetes" not in json.dumps(schema)
    assert "status" not in schema["properties"]
    editor = {path for path, _ in parts(schema["properties"]["spec"])}
    kubernetes = {path for path, _ in parts(schema_of(DEFINITIONS[0])["properties"]["spec"])}
    assert editor == kubernetes
