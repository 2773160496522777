"""Values of others, brought within the bounds of the API."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel

from rljob_api.inlined_schema import Schema, inlined_schema
from rljob_api.plan_change import MAX_NUMBER_NAME_LENGTH


def within_bounds(value: Any, model: type[BaseModel]) -> Any:
    """`value`, the JSON of a `model`, within the bounds of its schema: numbers are clipped, texts and lists are cut,
    unknown fields and names that are too long are dropped. A value of a wrong type stays."""
    return _fitted(value, _schema_of(model))


@cache
def _schema_of(model: type[BaseModel]) -> Schema:
    return inlined_schema(model)


def _fitted(value: Any, schema: Schema) -> Any:
    match value:
        case bool():
            return value
        case int() | float():
            return max(schema.get("minimum", value), min(value, schema.get("maximum", value)))
        case str():
            return value[: schema.get("maxLength")]
        case list():
            return [_fitted(item, schema.get("items", {})) for item in value[: schema.get("maxItems")]]
        case dict() if "properties" in schema:
            fields = schema["properties"]
            return {name: _fitted(below, fields[name]) for name, below in value.items() if name in fields}
        case dict() if isinstance(schema.get("additionalProperties"), dict):
            named = {name: below for name, below in value.items() if len(name) <= MAX_NUMBER_NAME_LENGTH}
            kept = list(named.items())[: schema.get("maxProperties")]
            return {name: _fitted(below, schema["additionalProperties"]) for name, below in kept}
    return value
