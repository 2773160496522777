"""Structural schemas (OpenAPI v3) of the API types, as CustomResourceDefinitions require them.

Rules: "Specifying a structural schema" in the Kubernetes documentation of CustomResourceDefinitions. Unlike in JSON
schema, every part has a type, `additionalProperties` and `properties` exclude each other (the API server prunes unknown
fields, kubectl refuses them), exclusive bounds are flags, and free-form objects are marked.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from rljob_api.inlined_schema import Schema, inlined_schema

_BOUNDS = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
_INT_OR_STRING = "x-kubernetes-int-or-string"
_PRESERVE_UNKNOWN = "x-kubernetes-preserve-unknown-fields"


def structural_schema(model: type[BaseModel]) -> Schema:
    """`openAPIV3Schema` of a root type, with apiVersion, kind and metadata as the API server requires them."""
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
    """Schema of an integer or a string. Kubernetes allows only types in `anyOf`; the bounds stand beside it, and each
    applies to its own type only."""
    bounds = {key: value for alternative in schema["anyOf"] for key, value in alternative.items() if key != "type"}
    around = {key: value for key, value in schema.items() if key != "anyOf"}
    return dict(sorted({**around, **bounds, "anyOf": [{"type": "integer"}, {"type": "string"}]}.items()))
