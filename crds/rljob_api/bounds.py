"""Values from other programs, converted to values that the API server accepts: within its bounds, in valid UTF-8."""

from __future__ import annotations

from functools import cache
from typing import Any, overload

from pydantic import BaseModel

from rljob_api.plan_change import MAX_NUMBER_NAME_LENGTH
from rljob_api.schemas import Schema, inlined_schema


def within_bounds(value: Any, model: type[BaseModel]) -> Any:
    """`value`, the JSON of a `model`, within the bounds of its schema: numbers are clipped, texts and lists are
    truncated, unknown fields and names that are too long are dropped. A value of a wrong type is returned as it is."""
    return _clipped_to(value, _schema_of(model))


@cache
def _schema_of(model: type[BaseModel]) -> Schema:
    return inlined_schema(model)


def _clipped_to(value: Any, schema: Schema) -> Any:
    match value:
        case bool():
            return value
        case int() | float():
            return max(schema.get("minimum", value), min(value, schema.get("maximum", value)))
        case str():
            return value[: schema.get("maxLength")]
        case list():
            return [_clipped_to(item, schema.get("items", {})) for item in value[: schema.get("maxItems")]]
        case dict() if "properties" in schema:
            fields = schema["properties"]
            return {name: _clipped_to(item, fields[name]) for name, item in value.items() if name in fields}
        case dict() if isinstance(schema.get("additionalProperties"), dict):
            short = [(name, item) for name, item in value.items() if len(name) <= MAX_NUMBER_NAME_LENGTH]
            kept = short[: schema.get("maxProperties")]
            return {name: _clipped_to(item, schema["additionalProperties"]) for name, item in kept}
    return value


# Text that can be stored: a Python string may contain half of a surrogate pair, which UTF-8 cannot encode.


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
        return {storable(key): storable(item) for key, item in value.items()}
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
