"""Values of others, brought into a form that the API server stores: within the bounds of the API, as valid UTF-8."""

from __future__ import annotations

from functools import cache
from typing import Any, overload

from pydantic import BaseModel

from rljob_api.plan_change import MAX_NUMBER_NAME_LENGTH
from rljob_api.schemas import Schema, inlined_schema


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


# Text that can be stored: UTF-8 has no form for half of a surrogate pair, which Python strings may hold.


@overload
def storable(value: str) -> str: ...
@overload
def storable(value: Any) -> Any: ...
def storable(value: Any) -> Any:
    r"""`value`, with each lone surrogate of its strings written as an escape such as `\ud83d`.

    Strings in lists, tuples and dicts (keys included) are converted too; other values are returned as they are. Such
    strings come from JSON, from text that was cut in the middle of a character, and from file names that are not UTF-8.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {storable(key): storable(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(storable, value))
    return value


def is_storable(text: str) -> bool:
    """False if `text` has a lone surrogate."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
