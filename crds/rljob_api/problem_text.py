"""Error messages about fields of a manifest: what was expected, what was found, what to write instead."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic_core import ErrorDetails

from rljob_api.inlined_schema import Schema, inlined_schema
from rljob_api.job import RLJob
from rljob_api.task_args import ARGS_OF_TASK
from rljob_api.yaml_document import Path

_AMOUNT = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt])i?b?\s*$", re.IGNORECASE)
_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")


class ProblemText:
    """Error messages for the validation errors of one manifest, made from its schema."""

    def __init__(self, data: Any) -> None:
        self._schema = _schema_for(data)

    def of(self, error: ErrorDetails) -> str:
        """Error message for one error of pydantic."""
        path, found, context = error["loc"], error["input"], error.get("ctx", {})
        match error["type"]:
            case "conflict":
                return str(context["message"])
            case "extra_forbidden":
                return self._unknown(path)
            case "missing":
                return f"required: {self._at(path).get('description', '')}".rstrip(": ")
            case "text":
                expected = str(context.get("expected") or error["msg"])
            case _:
                expected = expectation(self._at(path)) or error["msg"]
        return f"expected {expected}, found {_written(found)}{_hint(self._at(path), found)}"

    def _unknown(self, path: Path) -> str:
        """Error message for the unknown field at `path`, with the field that was probably meant."""
        name, around = str(path[-1]), path[:-1]
        siblings = list(self._at(around).get("properties", {}))
        if not siblings:
            return "unknown field: remove it, since no fields are allowed here"
        close = difflib.get_close_matches(_camel(name), siblings, n=1, cutoff=0.6)
        if close:
            return f"unknown field; did you mean {close[0]}?"
        elsewhere = [p for p in _paths(self._schema) if p.split(".")[-1] == name and not p.startswith("status.")]
        if elsewhere:
            return f"unknown field here: write it as {max(elsewhere, key=lambda p: p.split('.')[0] == path[0])}"
        return f"unknown field; the fields here are {', '.join(siblings)}"

    def _at(self, path: Path) -> Schema:
        schema = self._schema
        for part in path:
            below = schema.get("items") if isinstance(part, int) else schema.get("properties", {}).get(part)
            schema = below or {}
        return schema


def expectation(schema: Schema) -> str:
    """Description of the values that `schema` allows, such as `a whole number from 2 to 1024`; empty if it allows
    any."""
    if "enum" in schema or "const" in schema:
        *others, last = schema.get("enum", [schema.get("const")])
        return f"{', '.join(map(str, others))} or {last}" if others else str(last)
    match schema.get("type"):
        case "integer":
            return f"a whole number{_bounds(schema)}"
        case "number":
            return f"a number{_bounds(schema)}"
        case "boolean":
            return "true or false"
        case "string":
            return f"a string{_lengths(schema, 'characters')}"
        case "array":
            return f"a list{_lengths(schema, 'items')}"
        case "object":
            fields = ", ".join(schema.get("properties", {}))
            return f"an object with the fields {fields}" if fields else "an object"
    return ""


def _bounds(schema: Schema) -> str:
    lower = next((f"{word} {_plain(schema[key])}" for key, word in _LOWER if key in schema), "")
    upper = next((f"{word} {_plain(schema[key])}" for key, word in _UPPER if key in schema), "")
    if "minimum" in schema and "maximum" in schema:
        return f" from {_plain(schema['minimum'])} to {_plain(schema['maximum'])}"
    return f" {' and '.join(bound for bound in (lower, upper) if bound)}" if lower or upper else ""


_LOWER = (("minimum", "of at least"), ("exclusiveMinimum", "above"))
_UPPER = (("maximum", "at most"), ("exclusiveMaximum", "below"))


def _lengths(schema: Schema, things: str) -> str:
    least = schema.get("minLength", schema.get("minItems"))
    most = schema.get("maxLength", schema.get("maxItems"))
    bounds = [f"at least {least}" if least else "", f"at most {most}" if most else ""]
    return f" of {' and '.join(b for b in bounds if b)} {things}" if any(bounds) else ""


def _plain(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)


def _written(value: Any) -> str:
    """`value` as in the manifest, shortened."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _hint(schema: Schema, found: Any) -> str:
    """Suggestion for the value to write instead; empty without one."""
    allowed = [str(value) for value in schema.get("enum", [])]
    if isinstance(found, bool) and "Enabled" in allowed:
        return f"; write {'Enabled' if found else 'Disabled'}"
    if isinstance(found, bool) and not found and "Disabled" in allowed:
        return "; write Disabled (YAML reads off and no as false)"
    if isinstance(found, str) and allowed:
        close = {value.lower(): value for value in allowed}.get(found.lower()) or next(
            iter(difflib.get_close_matches(found, allowed, n=1)), None
        )
        return f"; did you mean {close}?" if close else ""
    if isinstance(found, str) and schema.get("x-kubernetes-int-or-string") and (amount := _AMOUNT.match(found)):
        number, unit = amount[1], amount[2].upper()
        return f"; write {number}{unit}i or {number}{unit.replace('K', 'k')}"
    if isinstance(found, str) and "hf|" in schema.get("pattern", "") and _HUB_NAME.match(found):
        return f"; did you mean hf://{found}?"
    if isinstance(found, str) and schema.get("type") in ("integer", "number", "boolean") and _is_literal(found):
        return "; remove the quotes"
    return ""


def _is_literal(text: str) -> bool:
    try:
        return isinstance(json.loads(text), int | float)
    except ValueError:
        return False


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(part.title() for part in others)


def _paths(schema: Schema, prefix: str = "") -> Iterator[str]:
    for name, below in schema.get("properties", {}).items():
        yield f"{prefix}{name}"
        yield from _paths(below, f"{prefix}{name}.")


def _schema_for(data: Any) -> Schema:
    """Schema of RLJob, with the arguments of the task in `data`."""
    schema: Schema = inlined_schema(RLJob)
    spec = data.get("spec") if isinstance(data, dict) else None
    task = spec.get("task") if isinstance(spec, dict) else None
    args = ARGS_OF_TASK.get(str(task.get("name"))) if isinstance(task, dict) else None
    if args:
        schema["properties"]["spec"]["properties"]["task"]["properties"]["args"] |= inlined_schema(args)
    return schema
