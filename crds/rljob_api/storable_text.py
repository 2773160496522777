"""Text that can be stored: UTF-8 has no form for half of a surrogate pair, which Python strings may hold."""

from __future__ import annotations

from typing import Any, overload


@overload
def storable(value: str) -> str: ...
@overload
def storable(value: Any) -> Any: ...
def storable(value: Any) -> Any:
    r"""`value`, with each lone surrogate of its strings written as an escape such as `\ud83d`.

    Strings in lists, tuples and dicts (keys included) are converted too; other values are returned as they are. Such
    strings come from JSON, from text that was cut in the middle of a character, and from file names that are not UTF-8.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {storable(key): storable(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(storable, value))
    return value


def is_storable(text: str) -> bool:
    """False if `text` has a lone surrogate."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
