"""The built-in reward functions, by name. Their arguments are `rljob_api.reward.BUILT_IN_REWARDS`.

A function has the parameters of a user's reward function, and `args` with its validated arguments. It returns a number,
or None to leave the response out.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple


class BuiltIn(NamedTuple):
    """A built-in reward function."""

    file: str
    """Module of this package that has the function."""

    compares: bool = False
    """True if it compares the response with the reference answer, which it should therefore reward."""

    remote: bool = False
    """True if it asks a server."""

    bounded: bool = False
    """True if a response may exceed the time or memory of the process, and then gets 0: it is no error."""

    def load(self, name: str) -> Callable[..., Any]:
        """The function. Raises `BadInput` if a package that it needs is not installed."""
        function: Callable[..., Any] = getattr(import_module(f"{__name__}.{self.file}"), name)
        return function


BUILT_IN: dict[str, BuiltIn] = {
    "exact_match": BuiltIn("text", compares=True),
    "math_verify": BuiltIn("mathematics", compares=True, bounded=True),
    "regex": BuiltIn("text"),
    "format": BuiltIn("text"),
    "length": BuiltIn("text"),
    "code": BuiltIn("code", bounded=True),
    "judge": BuiltIn("servers", remote=True),
    "reward_model": BuiltIn("servers", remote=True),
}


def references(record: dict[str, Any], field: str) -> list[str]:
    """The reference answers in a field of the record, as text; empty if it has none."""
    value = record.get(field)
    return [] if value is None else [str(each) for each in (value if isinstance(value, list) else [value])]
