"""The API server's handling of custom resources that the tests need: defaults and CEL rules."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import Any

import celpy

Schema = dict[str, Any]

_environment = celpy.Environment()


def with_defaults(value: Any, schema: Schema) -> Any:
    """`value` with the defaults of `schema`, top-down: an object that is a default gets its own defaults too."""
    if isinstance(value, dict):
        filled = {name: below for name, below in value.items() if below is not None}
        for name, below in schema.get("properties", {}).items():
            if name not in filled and "default" in below:
                filled[name] = deepcopy(below["default"])
        return {n: with_defaults(v, schema.get("properties", {}).get(n, {})) for n, v in filled.items()}
    if isinstance(value, list):
        return [with_defaults(item, schema.get("items", {})) for item in value]
    is_number = schema.get("type") == "number" and isinstance(value, int)
    return float(value) if is_number else value


def broken_rules(value: Any, schema: Schema, path: str = "") -> set[tuple[str, str]]:
    """(path of the named field, message) of every rule that `value`, with defaults, violates."""
    broken = set()
    for rule in schema.get("x-kubernetes-validations", []):
        if "oldSelf" not in rule["rule"] and not holds(rule["rule"], value):
            broken.add((f"{path}{rule.get('fieldPath', '')}".removeprefix("."), rule["message"]))
    if isinstance(value, dict):
        for name, below in schema.get("properties", {}).items():
            if name in value:
                broken |= broken_rules(value[name], below, f"{path}.{name}")
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        for index, item in enumerate(value):
            broken |= broken_rules(item, schema["items"], f"{path}[{index}]")
    return broken


def holds(rule: str, value: Any, old: Any = None) -> bool:
    """Returns True if the CEL `rule` holds for `value` and, for transitions, the `old` value."""
    return bool(_program(rule).evaluate({"self": celpy.json_to_cel(value), "oldSelf": celpy.json_to_cel(old)}))


@cache
def _program(rule: str) -> celpy.Runner:
    return _environment.program(_environment.compile(rule))


def parts(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Every schema within `schema`, itself first, with its dotted path."""
    yield path, schema
    for name, below in schema.get("properties", {}).items():
        yield from parts(below, f"{path}.{name}")
    for keyword in ("items", "additionalProperties"):
        if isinstance(schema.get(keyword), dict):
            yield from parts(schema[keyword], f"{path}[]")
