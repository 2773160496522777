"""The user's Python functions: `module:function` references for items and rewards."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from rljob_trainer.errors import BadInput
from rljob_trainer.tasks.task import Item


def call_for_items(reference: str, args: dict[str, Any], manifest_directory: Path) -> list[Item]:
    """Items from `function(**args)`, which returns an iterable of dicts with a `prompt`. A record is the whole dict.

    The function must return the same items in the same order in every attempt.
    """
    function = load_function(reference, manifest_directory)
    try:
        records = function(**args)
        records = list(records) if isinstance(records, Iterable) else records
    except Exception as error:  # user code may raise anything
        raise BadInput(f"the task function {reference} raised {type(error).__name__}: {error}") from error
    if not isinstance(records, list):
        raise BadInput(f"expected a list of items from the task function {reference}, found {type(records).__name__}")
    return [_item(record, index, reference) for index, record in enumerate(records)]


def _item(record: Any, index: int, reference: str) -> Item:
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise BadInput(
            f"expected item {index} of the task function {reference} to be a dict with a text called 'prompt', "
            f"found {record!r:.200}"
        )
    return Item(record["prompt"], record)


def require_reward_signature(function: Callable[..., Any], reference: str) -> None:
    """Raise `BadInput` if `function` cannot be called with an answer and a record."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin without a signature
    try:
        signature.bind("", {})
    except TypeError as error:
        name = reference.partition(":")[2]
        raise BadInput(
            f"task.reward {reference}: expected {name}(answer: str, record: dict) -> float, found {name}{signature} "
            f"({error})"
        ) from None


def load_function(reference: str, directory: Path) -> Callable[..., Any]:
    """The function of `reference` ("module:function"). Modules in `directory` take precedence."""
    function_name = reference.partition(":")[2]
    module = load_module(reference, directory)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise BadInput(f"expected a function {function_name} in {module.__file__}, found none")
    return function  # type: ignore[no-any-return]


def load_module(reference: str, directory: Path) -> ModuleType:
    """The module of `reference` ("module:function"). Modules in `directory` take precedence.

    `directory` stays on the import path, since the module may import others from it later.
    """
    module_name = reference.partition(":")[0]
    path = str(directory.resolve())
    if path not in sys.path:
        sys.path.insert(0, path)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # user code may raise anything
        advice = "correct that module"
        if isinstance(error, ModuleNotFoundError):
            missing = error.name or module_name
            advice = f"expected {missing.replace('.', '/')}.py in {directory} or an installed module"
        raise BadInput(
            f"cannot import {module_name} for {reference}: {type(error).__name__}: {error}; {advice}"
        ) from error
