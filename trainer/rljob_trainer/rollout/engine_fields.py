"""The engine arguments of the installed vLLM and their values, read from its source.

Importing vLLM takes seconds, parsing 60 ms.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar  # noqa: F401  # vLLM's annotations, evaluated here, name Literal

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUndefinedAnnotation

from rljob_client.errors import BadInput
from rljob_trainer.rollout.config import refused_argument

Found = TypeVar("Found")

_SOURCE = Path("engine", "arg_utils.py")
_CLASS = "EngineArgs"
_VALUES = {
    "quantization": (Path("model_executor", "layers", "quantization", "__init__.py"), "QuantizationMethods"),
    "kv_cache_dtype": (Path("config", "cache.py"), "CacheDType"),
}
"""Module and name of the Literal with the values of an argument."""


@cache
def installed_engine_fields() -> Mapping[str, str] | None:
    """Annotations of vLLM's EngineArgs by name; None if vLLM is not installed, or its source has another form."""
    return _in_installed_vllm(_SOURCE, fields_in) or None


@cache
def installed_values(argument: str) -> Collection[str] | None:
    """The values of an argument in the installed vLLM; None if they cannot be read, see `installed_engine_fields`.

    `argument`: quantization or kv_cache_dtype.
    """
    module, name = _VALUES[argument]
    return _in_installed_vllm(module, lambda source: literal_in(source, name)) or None


def literal_in(source: str, name: str) -> list[str]:
    """The values of `name = Literal[…]` in the text of a module; empty if it has no such line."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and any(isinstance(at, ast.Name) and at.id == name for at in node.targets):
            values = (part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant))
            return [value for value in values if isinstance(value, str)]
    return []


def fields_in(source: str) -> dict[str, str]:
    """Annotations of the fields of EngineArgs in the text of a module, by name; empty if it has no such class."""
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == _CLASS]
    return {
        node.target.id: ast.unparse(node.annotation)
        for found in classes
        for node in found.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def engine_args_problems(args: Mapping[str, Any], fields: Mapping[str, str]) -> dict[str, str]:
    """Message by name for arguments that are refused or unknown, or whose value has another type.

    `fields`: annotations by name, see `installed_engine_fields`.
    """
    found = {}
    for name, value in args.items():
        if reason := refused_argument(name):
            found[name] = f"expected no such argument: {reason}"
        elif name not in fields:
            close = get_close_matches(name, fields, n=2)
            hint = f"did you mean {' or '.join(close)}?" if close else "remove it"
            found[name] = f"is not an engine argument of the installed vLLM: {hint}"
        elif not _matches(value, fields[name]):
            found[name] = f"expected {fields[name]}, found {value!r:.100}"
    return found


def require_engine_args(args: Mapping[str, Any]) -> None:
    """Raise `BadInput` for arguments that are refused, that the installed vLLM does not have, or of another type."""
    fields = installed_engine_fields()
    if args and fields is not None and (problems := engine_args_problems(args, fields)):
        raise BadInput("; ".join(f"rollout.engineArgs.{name}: {message}" for name, message in problems.items()))


def _in_installed_vllm(module: Path, read: Callable[[str], Found]) -> Found | None:
    """The result of `read` for the text of a module; None if vLLM is not installed, or has no such module."""
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        try:
            return read((Path(folder) / module).read_text(encoding="utf-8"))
        except (OSError, SyntaxError):
            return None
    return None


def _matches(value: Any, annotation: str) -> bool:
    """False if `value`, from JSON, does not have the type. Types that only vLLM knows match everything."""
    try:
        expected = TypeAdapter[Any](annotation.strip("'\""))  # type: ignore[arg-type]
        expected.rebuild(raise_errors=True)
        expected.validate_json(json.dumps(value), strict=True)
    except PydanticUndefinedAnnotation:
        return True
    except ValidationError:
        return False
    return True
