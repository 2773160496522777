"""All validation errors of a manifest, including those that other errors would hide."""

from __future__ import annotations

from copy import deepcopy
from itertools import takewhile
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rljob_api.api_model import Rule
from rljob_api.job import RLJob
from rljob_api.yaml_document import Path

_SMALLEST_JOB: dict[str, Any] = {
    "metadata": {"name": "smallest"},
    "spec": {"model": {"uri": "random://qwen3"}, "task": {"name": "digits"}, "algorithm": {"steps": 10_000_000}},
}


class Checked(NamedTuple):
    """A manifest, checked."""

    errors: list[ErrorDetails]
    """All errors; empty if it is a valid RLJob."""
    job: RLJob
    """The RLJob, with valid values in the place of invalid ones."""
    replaced: frozenset[Path]
    """Paths of the replaced values."""


def all_errors(data: dict[str, Any]) -> list[ErrorDetails]:
    """All errors in `data`; empty if it is a valid RLJob."""
    return checked(data).errors


def checked(data: dict[str, Any]) -> Checked:
    """Checks `data`.

    Pydantic checks rules between fields only if all fields of an object are valid. So this function replaces invalid
    values with valid ones until no new error appears. Errors that a replaced value caused do not count.
    """
    found: list[ErrorDetails] = []
    replaced: set[Path] = set()
    while errors := _errors(_mended(data, replaced)):
        known = {error["loc"] for error in found}
        found += [e for e in errors if e["loc"] not in known and not _comes_of(e, replaced)]
        replaced |= {_replaceable(error["loc"], replaced) for error in errors}
    job = RLJob.model_validate(_mended(data, replaced), by_alias=True, by_name=False)
    return Checked(found, job, frozenset(replaced))


def _errors(data: dict[str, Any]) -> list[ErrorDetails]:
    try:
        RLJob.model_validate(data, by_alias=True, by_name=False)
    except ValidationError as error:
        return error.errors(include_url=False)
    return []


def _mended(data: dict[str, Any], replaced: set[Path]) -> dict[str, Any]:
    """`data` without the values at the `replaced` paths, and with the fields that a job requires."""
    if not replaced:
        return data
    mended = deepcopy(data)
    for path in replaced:
        _remove(mended, path)
    _fill(mended, _SMALLEST_JOB)
    return mended


def _replaceable(path: Path, replaced: set[Path]) -> Path:
    """Path to replace for an error at `path`: the field, or the object around it if replacing the field did not help.

    A task's arguments depend on its name, so the task is replaced as a whole; so is a list with a bad item.
    """
    if path[:3] == ("spec", "task", "args"):
        path = ("spec", "task")
    path = tuple(takewhile(lambda part: isinstance(part, str), path))
    while path in replaced:
        path = path[:-1]
    return path


def _comes_of(error: ErrorDetails, replaced: set[Path]) -> bool:
    """True if `error` comes from a rule that reads one of the `replaced` fields, or from the arguments of another
    task."""
    if error["loc"][:3] == ("spec", "task", "args") and ("spec", "task", "name") in replaced:
        return True
    rule = error.get("ctx", {}).get("rule")
    if not isinstance(rule, Rule):
        return False
    owner = error["loc"][: -len(rule.field.split("."))]
    within = [path[len(owner) :] for path in replaced if path[: len(owner)] == owner]
    return any(not path or rule.reads(".".join(map(str, path))) for path in within)


def _remove(data: Any, path: Path) -> None:
    for part in path[:-1]:
        data = data.get(part) if isinstance(data, dict) else None
    if isinstance(data, dict):
        data.pop(path[-1], None)


def _fill(data: dict[str, Any], missing: dict[str, Any]) -> None:
    for name, value in missing.items():
        if isinstance(data.get(name), dict) and isinstance(value, dict):
            _fill(data[name], value)
        elif data.get(name) is None:
            data[name] = deepcopy(value)
