"""The error for a manifest that cannot be turned into pods, and checks of types."""

from __future__ import annotations

from typing import Any


class InvalidTemplate(ValueError):
    """The message names the field, the error and the fix."""

    @property
    def sentence(self) -> str:
        return str(self)


def expect_object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidTemplate(f"{path}: expected an object, found {kind_of(value)}")
    return value


def expect_list(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidTemplate(f"{path}: expected a list, found {kind_of(value)}")
    return value


def kind_of(value: Any) -> str:
    """In the words of the messages."""
    if isinstance(value, dict):
        return "an object"
    return "a list" if isinstance(value, list) else "a value"
