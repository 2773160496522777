"""The functions of the built-in rewards (`rljob_api.built_in_rewards.BUILT_IN_REWARDS`), by name.

A function has the parameters of a user's reward function, and `args` with its validated arguments. It returns a number,
or None to leave the response out.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from rljob_api.built_in_rewards import BUILT_IN_REWARDS


def built_in_function(name: str) -> Callable[..., Any]:
    """The function of a built-in reward. Raises `BadInput` if a package that it needs is not installed."""
    function: Callable[..., Any] = getattr(import_module(f"{__name__}.{BUILT_IN_REWARDS[name].module}"), name)
    return function


def references(record: dict[str, Any], field: str) -> list[str]:
    """The reference answers in a field of the record, as text; empty if it has none."""
    value = record.get(field)
    return [] if value is None else [str(each) for each in (value if isinstance(value, list) else [value])]
