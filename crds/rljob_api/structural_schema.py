"""The schema of an API type in the dialect of Kubernetes: a structural schema of OpenAPI v3.

Rules: "Specifying a structural schema" in the Kubernetes documentation of CustomResourceDefinitions. Other than in JSON
schema, every part has a type, `additionalProperties` and `properties` exclude each other (unknown fields are pruned, or
refused by kubectl), exclusive bounds are flags, and free-form objects say so.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from rljob_api.inlined_schema import Schema, inlined_schema

_BOUNDS = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
_INT_OR_STRING = "x-kubernetes-int-or-string"
_PRESERVE_UNKNOWN = "x-kubernetes-preserve-unknown-fields"


def structural_schema(model: type[BaseModel]) -> Schema:
    """`openAPIV3Schema` of a root type. apiVersion, kind and metadata are as the API server wants them."""
    schema = _structural(inlined_schema(model))
    for field in ("apiVersion", "kind"):
        described = schema["properties"][field]["description"]
        schema["properties"][field] = {"type": "string", "description": described}
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def _structural(schema: Schema) -> Schema:
    if _INT_OR_STRING in schema:
        return _int_or_string(schema)
    result: Schema = {}
    for key, value in schema.items():
        match key:
            case "properties":
                result[key] = {name: _structural(below) for name, below in value.items()}
            case "items":
                result[key] = _structural(value)
            case "additionalProperties":
                result |= _additional_properties(value)
            case "exclusiveMinimum" | "exclusiveMaximum":
                result |= {_BOUNDS[key]: value, key: True}
            case "const":
                result["enum"] = [value]
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
    """The alternatives may only be named; what bounds each of them stands beside them, and binds only its own type."""
    bounds = {key: value for alternative in schema["anyOf"] for key, value in alternative.items() if key != "type"}
    around = {key: value for key, value in schema.items() if key != "anyOf"}
    return dict(sorted({**around, **bounds, "anyOf": [{"type": "integer"}, {"type": "string"}]}.items()))
