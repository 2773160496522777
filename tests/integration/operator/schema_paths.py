"""Ways through a schema and through the objects that it describes, by dotted paths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Object = dict[str, Any]


def rules(schema: Object, path: str = "") -> Iterator[tuple[str, Object]]:
    """(path of the object it is about, rule) of every CEL rule in the schema."""
    for rule in schema.get("x-kubernetes-validations", []):
        yield path, rule
    for name, below in schema.get("properties", {}).items():
        yield from rules(below, f"{path}.{name}".removeprefix("."))
    if isinstance(schema.get("items"), dict):
        yield from rules(schema["items"], f"{path}[]")


def at(value: Object, path: str) -> Any:
    """The value at the path; None if a part of it is absent."""
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None  # type: ignore[assignment]
    return value


def replaced(value: Object, path: str, new: Any) -> Object:
    """A copy with something else at the path; `new` None: without it."""
    name, _, rest = path.partition(".")
    copy = dict(value)
    if rest:
        copy[name] = replaced(copy.get(name) or {}, rest, new)
    elif new is None:
        copy.pop(name, None)
    else:
        copy[name] = new
    return copy


def nested(path: str, value: Any) -> Object:
    """An object with nothing but `value`, at the path: as a merge patch, it changes that alone, and None removes."""
    name, _, rest = path.partition(".")
    return {name: nested(rest, value) if rest else value}
