"""JSON schemas of the API types as trees: without references, and without `null` as an alternative."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]

_RULES = "x-kubernetes-validations"


def inlined_schema(model: type[BaseModel]) -> Schema:
    """JSON schema (draft 2020-12) of `model` with camelCase names, as a tree without shared parts."""
    schema = model.model_json_schema(by_alias=True, mode="validation")
    definitions = schema.pop("$defs", {})
    inlined: Schema = _inlined(schema, definitions)
    return inlined


def _inlined(schema: Any, definitions: dict[str, Schema]) -> Any:
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    own = {key: _inlined(value, definitions) for key, value in schema.items() if key not in ("$ref", "title")}
    if isinstance(own.get("description"), str):
        own["description"] = " ".join(own["description"].split())
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        own = _under(_inlined(definitions[name], definitions), own)
    return _without_null(own)


def _without_null(schema: Schema) -> Schema:
    """`schema` without its `null` alternative: to the API server, `null` and an absent field are the same."""
    if {"type": "null"} not in schema.get("anyOf", []):
        return schema
    given = [alternative for alternative in schema["anyOf"] if alternative != {"type": "null"}]
    around = {key: value for key, value in schema.items() if key != "anyOf" and (key, value) != ("default", None)}
    return _under(given[0], around) if len(given) == 1 else {**around, "anyOf": given}


def _under(type_schema: Schema, field_schema: Schema) -> Schema:
    """Schema of a type, overridden by the schema of a field of that type; the rules of both apply."""
    merged = type_schema | field_schema
    if "properties" in merged and "default" in merged:
        merged["default"] = {}  # the properties have defaults of their own
    rules = [*type_schema.get(_RULES, []), *field_schema.get(_RULES, [])]
    return merged | {_RULES: rules} if rules else merged
