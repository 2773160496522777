"""All problems of a manifest: its validation errors, and a message for each."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from itertools import takewhile
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rljob_api.api_model import Rule
from rljob_api.built_in_rewards import BUILT_IN_REWARDS
from rljob_api.job import RLJob
from rljob_api.manifest.option_names import normalized, option_advice
from rljob_api.manifest.value_hints import hint
from rljob_api.manifest.yaml_document import Document, Path
from rljob_api.schemas import Schema, inlined_schema
from rljob_api.task_args import TASKS

# Error messages about fields of a manifest: the expected value, the value found, and the correction.

_MAX_OPTIONS_SHOWN = 8
"""Maximum options of another program that one message translates."""


class ProblemText:
    """Error messages for the validation errors of one manifest, made from its schema."""

    def __init__(self, document: Document, directory: FilePath | None = None) -> None:
        """`directory` is that of the manifest; None if the manifest is not a file on this machine."""
        self._document = document
        self._directory = directory
        self._schema = _schema_for(document.data)

    def of(self, error: ErrorDetails) -> str:
        """Error message for one error of pydantic."""
        path, found, context = error["loc"], error["input"], error.get("ctx", {})
        schema = schema_at(path, self._schema)
        match error["type"]:
            case "conflict":
                return str(context["message"])
            case "extra_forbidden":
                return self._unknown(path, found)
            case "missing":
                return f"required: {schema.get('description', '')}".rstrip(": ")
            case "text":
                expected = str(context.get("expected") or error["msg"])
            case _:
                expected = expectation(schema) or error["msg"]
        field = ".".join(str(part) for part in path if isinstance(part, str))
        written = self._document.written.get(path)
        return f"expected {expected}, found {_shown_value(found)}{hint(field, schema, found, written, self._directory)}"

    def _unknown(self, path: Path, found: Any) -> str:
        """Error message for the unknown field at `path`, with the field that was probably meant."""
        name, parent = str(path[-1]), path[:-1]
        siblings = list(schema_at(parent, self._schema).get("properties", {}))
        if not siblings:
            return "unknown field: remove it, since no fields are allowed here"
        key, colon, value = name.partition(":")
        if colon and found is None:
            return f"unknown field; write a space after the colon: {key}: {value}"
        if "\u00a0" in name:
            return "unknown field: its name has a no-break space (U+00A0); replace it by a space"
        if same := {normalized(sibling): sibling for sibling in siblings}.get(normalized(name)):
            return f"unknown field; did you mean {same}?"
        names = tuple(str(part) for part in path)
        if isinstance(found, dict) and (options := list(_options_in(found, names))):
            more = f", and {len(options) - _MAX_OPTIONS_SHOWN} others" if len(options) > _MAX_OPTIONS_SHOWN else ""
            return f"unknown field; {', '.join(options[:_MAX_OPTIONS_SHOWN])}{more}"
        if names[2:3] != ("rewards",) and (advice := option_advice(names)) is not None:
            target, _, remark = advice.partition(" ")
            if target.rpartition(".")[0] == ".".join(map(str, parent)) and target.rpartition(".")[2] in siblings:
                return f"unknown field; did you mean {target.rpartition('.')[2]}?{f' {remark}' if remark else ''}"
            return f"unknown field; {'write ' if _is_path(target) else ''}{advice}"
        return self._closest_field(path, found, siblings)

    def _closest_field(self, path: Path, found: Any, siblings: list[str]) -> str:
        """Error message for an unknown field that is not an option of a known program."""
        name = str(path[-1])
        paths = [p for p in _paths(self._schema) if not p.startswith("status.")]
        elsewhere = [p for p in paths if normalized(p.split(".")[-1]) == normalized(name)]
        if elsewhere:
            return f"unknown field here: write it as {max(elsewhere, key=lambda p: _shared_parts(p, path))}"
        if close := _closest(name, siblings):
            return f"unknown field; did you mean {close}?"
        written = self._document.written_names.get(path)
        if written is not None and found is None and type(json.loads(name)) in (int, float):
            return "unknown field: a comma ends the value before it; write a decimal number with a point"
        if written is not None:
            return f"unknown field: YAML reads the name {written} as {name}; write it in quotes, or remove it"
        names = {p.split(".")[-1]: p for p in reversed(paths) if p.count(".") > 1}
        if close := _closest(name, list(names)):
            return f"unknown field; did you mean {names[close]}?"
        return f"unknown field; the fields here are {', '.join(siblings)}"


def schema_at(path: Path, schema: Schema) -> Schema:
    """The schema of the field at `path`; empty if it has none."""
    for part in path:
        additional = schema.get("additionalProperties")
        default = additional if isinstance(additional, dict) else None
        field = schema.get("properties", {}).get(part, default)
        schema = (schema.get("items") if isinstance(part, int) else field) or {}
    return schema


def schema_of(field: str) -> Schema:
    """The schema of a `field` of the spec (dotted)."""
    return schema_at(("spec", *field.split(".")), _schema())


def is_number(path: Path) -> bool:
    """True if the field at `path` of an RLJob takes a number."""
    schema = schema_at(path, _schema())
    return schema.get("type") in ("integer", "number") or "x-kubernetes-int-or-string" in schema


def _options_in(options: dict[str, Any], parent: tuple[str, ...]) -> Iterator[str]:
    """Translation of each known option in the object of another program at `parent`."""
    for name, value in options.items():
        path = (*parent, str(name))
        if isinstance(value, dict) and (translated := list(_options_in(value, path))):
            yield from translated
        elif (advice := option_advice(path)) is not None:
            dotted = ".".join(path[1:])
            yield f"write {dotted} as {advice}" if _is_path(advice) else f"{dotted}: {advice}"


def _is_path(advice: str) -> bool:
    return advice.startswith(("spec.", "metadata."))


def _shared_parts(field: str, path: Path) -> int:
    """Number of objects that contain both."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(field.split("."), path, strict=False)))


def _closest(name: str, names: list[str]) -> str | None:
    same_case = {known.lower(): known for known in names}
    close = difflib.get_close_matches(normalized(name), list(same_case), n=1, cutoff=0.75)
    return same_case[close[0]] if close else None


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
            return f"a string{_shown_lengths(schema, 'characters')}"
        case "array":
            return f"a list{_shown_lengths(schema, 'items')}"
        case "object":
            fields = ", ".join(schema.get("properties", {}))
            return f"an object with the fields {fields}" if fields else "an object"
    return ""


def _bounds(schema: Schema) -> str:
    lower = next((f"{word} {_shown_number(schema[key])}" for key, word in _LOWER if key in schema), "")
    upper = next((f"{word} {_shown_number(schema[key])}" for key, word in _UPPER if key in schema), "")
    if "minimum" in schema and "maximum" in schema:
        return f" from {_shown_number(schema['minimum'])} to {_shown_number(schema['maximum'])}"
    return f" {' and '.join(bound for bound in (lower, upper) if bound)}" if lower or upper else ""


_LOWER = (("minimum", "of at least"), ("exclusiveMinimum", "above"))
_UPPER = (("maximum", "at most"), ("exclusiveMaximum", "below"))


def _shown_lengths(schema: Schema, unit: str) -> str:
    minimum = schema.get("minLength", schema.get("minItems"))
    maximum = schema.get("maxLength", schema.get("maxItems"))
    bounds = [f"at least {minimum}" if minimum else "", f"at most {maximum}" if maximum else ""]
    return f" of {' and '.join(bound for bound in bounds if bound)} {unit}" if any(bounds) else ""


def _shown_number(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)


def _shown_value(value: Any) -> str:
    """`value` as in the manifest, shortened."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _paths(schema: Schema, prefix: str = "") -> Iterator[str]:
    for name, field in schema.get("properties", {}).items():
        yield f"{prefix}{name}"
        yield from _paths(field, f"{prefix}{name}.")


@cache
def _schema() -> Schema:
    return inlined_schema(RLJob)


def _schema_for(data: Any) -> Schema:
    """Schema of RLJob, with the arguments of the task in `data`."""
    schema = inlined_schema(RLJob)
    spec = data.get("spec") if isinstance(data, dict) else None
    task = spec.get("task") if isinstance(spec, dict) else None
    built_in = TASKS.get(str(task.get("name"))) if isinstance(task, dict) else None
    if built_in:
        schema["properties"]["spec"]["properties"]["task"]["properties"]["args"] |= inlined_schema(built_in.args)
    rewards = task.get("rewards") if isinstance(task, dict) else None
    for reward in rewards if isinstance(rewards, list) else ():
        found = str(reward.get("function") or reward.get("name")) if isinstance(reward, dict) else ""
        if found in BUILT_IN_REWARDS:
            written = schema_at(("spec", "task", "rewards", 0, "args"), schema)
            written.setdefault("properties", {}).update(inlined_schema(BUILT_IN_REWARDS[found].args)["properties"])
    return schema


# All validation errors of a manifest, also those that other errors would hide.

_SMALLEST_JOB: dict[str, Any] = {
    "metadata": {"name": "smallest"},
    "spec": {"model": {"uri": "random://qwen3"}, "task": {"name": "digits"}, "algorithm": {"steps": 10_000_000}},
}


class Checked(NamedTuple):
    """Result of the validation of a manifest."""

    errors: list[ErrorDetails]
    """All errors; empty if it is a valid RLJob."""
    job: RLJob
    """The RLJob, with valid values in the place of invalid ones."""
    replaced: frozenset[Path]
    """Paths of the replaced values."""


def checked(data: dict[str, Any]) -> Checked:
    """Validate `data` as an RLJob, and return all errors.

    Pydantic checks the rules between the fields of an object only if all of its fields are valid. This function
    therefore replaces invalid values with valid ones until no new error appears. Errors that a replacement causes are
    left out.
    """
    found: list[ErrorDetails] = []
    replaced: set[Path] = set()
    while errors := _errors(_with_replacements(data, replaced)):
        known = {error["loc"] for error in found}
        found += [e for e in errors if e["loc"] not in known and not _is_caused_by(e, replaced)]
        replaced |= {_replaceable(error["loc"], replaced) for error in errors}
    job = RLJob.model_validate(_with_replacements(data, replaced), by_alias=True, by_name=False)
    return Checked(found, job, frozenset(replaced))


def _errors(data: dict[str, Any]) -> list[ErrorDetails]:
    try:
        RLJob.model_validate(data, by_alias=True, by_name=False)
    except ValidationError as error:
        return error.errors(include_url=False)
    return []


def _with_replacements(data: dict[str, Any], replaced: set[Path]) -> dict[str, Any]:
    """`data` without the values at the `replaced` paths, and with the fields that a job requires."""
    if not replaced:
        return data
    result = deepcopy(data)
    for path in replaced:
        _remove_value(result, path)
    _fill_in(result, _SMALLEST_JOB)
    return result


def _replaceable(path: Path, replaced: set[Path]) -> Path:
    """Path to replace for an error at `path`: the field, or its object if replacing the field did not help.

    A task is replaced as a whole, because its arguments depend on its name; so is a list with an invalid item.
    """
    if path[:3] == ("spec", "task", "args"):
        path = ("spec", "task")
    path = tuple(takewhile(lambda part: isinstance(part, str), path))
    while path in replaced:
        path = path[:-1]
    return path


def _is_caused_by(error: ErrorDetails, replaced: set[Path]) -> bool:
    """True if `error` comes from a rule that reads one of the `replaced` fields, or from the arguments of another
    task."""
    if error["loc"][:3] == ("spec", "task", "args") and ("spec", "task", "name") in replaced:
        return True
    rule = error.get("ctx", {}).get("rule")
    if not isinstance(rule, Rule):
        return False
    parent = error["loc"][: -len(rule.field.split("."))]
    relative = [path[len(parent) :] for path in replaced if path[: len(parent)] == parent]
    return any(not path or rule.reads(".".join(map(str, path))) for path in relative)


def _remove_value(data: Any, path: Path) -> None:
    for part in path[:-1]:
        data = data.get(part) if isinstance(data, dict) else None
    if isinstance(data, dict):
        data.pop(path[-1], None)


def _fill_in(data: dict[str, Any], missing: dict[str, Any]) -> None:
    for name, value in missing.items():
        if isinstance(data.get(name), dict) and isinstance(value, dict):
            _fill_in(data[name], value)
        elif data.get(name) is None:
            data[name] = deepcopy(value)
