"""Schemas of the API types: JSON schema as a tree, and the structural schema of a CustomResourceDefinition."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]

_RULES = "x-kubernetes-validations"


# JSON schemas of the API types as trees: without references, and without `null` as an alternative.


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
    result = {key: _inlined(value, definitions) for key, value in schema.items() if key not in ("$ref", "title")}
    if isinstance(result.get("description"), str):
        result["description"] = " ".join(result["description"].split())
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        result = _overridden(_inlined(definitions[name], definitions), result)
    return _without_null(result)


def _without_null(schema: Schema) -> Schema:
    """`schema` without its `null` alternative: to the API server, `null` and an absent field are the same."""
    if {"type": "null"} not in schema.get("anyOf", []):
        return schema
    types = [alternative for alternative in schema["anyOf"] if alternative != {"type": "null"}]
    others = {key: value for key, value in schema.items() if key != "anyOf" and (key, value) != ("default", None)}
    return _overridden(types[0], others) if len(types) == 1 else {**others, "anyOf": types}


def _overridden(type_schema: Schema, field_schema: Schema) -> Schema:
    """Schema of a type, overridden by the schema of a field of that type; the rules of both apply."""
    merged = type_schema | field_schema
    if "properties" in merged and "default" in merged:
        merged["default"] = {}  # the properties have defaults of their own
    rules = [*type_schema.get(_RULES, []), *field_schema.get(_RULES, [])]
    return merged | {_RULES: rules} if rules else merged


# Structural schemas (OpenAPI v3) of the API types, as CustomResourceDefinitions require them.
#
# Rules: "Specifying a structural schema" in the Kubernetes documentation of CustomResourceDefinitions. Unlike in JSON
# schema, every part has a type, `additionalProperties` and `properties` exclude each other (the API server prunes
# unknown fields, kubectl refuses them), exclusive bounds are flags, and free-form objects are marked.

_BOUNDS = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
_INT_OR_STRING = "x-kubernetes-int-or-string"
_PRESERVE_UNKNOWN = "x-kubernetes-preserve-unknown-fields"


def structural_schema(model: type[BaseModel]) -> Schema:
    """`openAPIV3Schema` of a root type, with apiVersion, kind and metadata as the API server requires them."""
    schema = _structural(inlined_schema(model))
    for field in ("apiVersion", "kind"):
        description = schema["properties"][field]["description"]
        schema["properties"][field] = {"type": "string", "description": description}
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def _structural(schema: Schema) -> Schema:
    if _INT_OR_STRING in schema:
        return _int_or_string(schema)
    result: Schema = {}
    for key, value in schema.items():
        match key:
            case "properties":
                result[key] = {name: _structural(field) for name, field in value.items()}
            case "items":
                result[key] = _structural(value)
            case "additionalProperties":
                result |= _additional_properties(value)
            case "exclusiveMinimum" | "exclusiveMaximum":
                result |= {_BOUNDS[key]: value, key: True}
            case "const":
                result["enum"] = [value]
            case "propertyNames":
                pass  # the API server does not know it; the names are checked when the object is read
            case _:
                result[key] = value
    return dict(sorted(result.items()))


def _additional_properties(value: Any) -> Schema:
    if value is False:
        return {}
    if value is True:
        return {_PRESERVE_UNKNOWN: True}
    return {"additionalProperties": _structural(value)}


def _int_or_string(schema: Schema) -> Schema:
    """Schema of an integer or a string. Kubernetes allows only types in `anyOf`, so the bounds stand next to it; each
    applies only to values of its type."""
    bounds = {key: value for alternative in schema["anyOf"] for key, value in alternative.items() if key != "type"}
    others = {key: value for key, value in schema.items() if key != "anyOf"}
    return dict(sorted({**others, **bounds, "anyOf": [{"type": "integer"}, {"type": "string"}]}.items()))
