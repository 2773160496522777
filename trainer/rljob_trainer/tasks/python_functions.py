"""The user's Python functions: `module:function` references for items and rewards."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sized
from itertools import islice
from pathlib import Path
from typing import Any

from rljob_client.errors import BadInput
from rljob_trainer.tasks.item_fields import question_of
from rljob_trainer.tasks.task import Item
from rljob_trainer.tasks.task_modules import load_module
from rljob_trainer.tasks.user_code import call, error_text, short_repr, user_code

_MOST_GENERATED_ITEMS = 2_000_000
"""Most items of a generator, which may be endless. A list is as long as it is."""


def call_for_items(reference: str, args: dict[str, Any], manifest_directory: Path) -> list[Item]:
    """Items from `function(**args)`, which returns an iterable of dicts with a `prompt`. A record is the whole dict.

    The function must return the same items in the same order in every attempt. Raises `BadInput`.
    """
    function = load_function(reference, manifest_directory)
    with user_code(f"the task function {reference}"):
        records = call(function, **args)
        if isinstance(records, str | bytes | Mapping) or not isinstance(records, Iterable):
            raise BadInput(
                f"expected a list of items from the task function {reference}, found {type(records).__name__}; "
                "return a list of dicts with a 'prompt'"
            )
        items = list(records if isinstance(records, Sized) else islice(records, _MOST_GENERATED_ITEMS + 1))
    if not isinstance(records, Sized) and len(items) > _MOST_GENERATED_ITEMS:
        raise BadInput(
            f"expected at most {_MOST_GENERATED_ITEMS:,} items from the generator of the task function {reference}, "
            "found more; end it, or return a list"
        )
    return [_item(record, f"item {index} of the task function {reference}") for index, record in enumerate(items)]


def _item(record: Any, where: str) -> Item:
    if not isinstance(record, dict):
        raise BadInput(f"expected {where} to be a dict with a 'prompt', found {short_repr(record)}")
    with user_code(where):
        question = question_of(record, "prompt", where, advice="return the prompt under the key 'prompt'")
    try:
        pickle.dumps(record)
    except BaseException as error:
        raise BadInput(
            f"{where}: expected a record that can be pickled, since rewards are computed in other processes, found one "
            f"that {error_text(error)}; use numbers, strings, lists and dicts"
        ) from error
    return Item(question, record)


def load_function(reference: str, directory: Path) -> Callable[..., Any]:
    """The function of `reference` ("module:function"), whose module is in `directory` or an installed package.

    Raises `BadInput` if there is none.
    """
    function_name = reference.partition(":")[2]
    module = load_module(reference, directory)
    with user_code(f"the module {module.__name__}"):
        function = getattr(module, function_name, None)
    if not callable(function):
        raise BadInput(f"expected a function {function_name} in {module.__file__}, found none")
    return function  # type: ignore[no-any-return]
