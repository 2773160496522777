"""Text is read and written as UTF-8, whatever the locale of the process."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
SHIPPED = ("crds", "memory", "operator", "trainer", "charts", "images")
OPENING = {"open", "fdopen"}
PROCESSES = {"run", "Popen", "check_output", "check_call", "call"}


def calls_without_encoding(source: str) -> Iterator[int]:
    """Lines of the calls in `source` that read or write text in the encoding of the locale."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _uses_text(node) and not any(key.arg == "encoding" for key in node.keywords):
            yield node.lineno


def _uses_text(call: ast.Call) -> bool:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    of_class = isinstance(function, ast.Attribute)
    owner = function.value.id if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) else ""
    if name == "read_text":
        return of_class and not call.args
    if name == "write_text":
        return of_class and len(call.args) == 1
    if name in PROCESSES and owner == "subprocess":
        return any(key.arg in ("text", "universal_newlines") for key in call.keywords)
    if name not in OPENING or (owner in ("os", "tarfile", "zipfile", "Image") and name == "open"):
        return False
    return "b" not in _mode(call, first=0 if of_class and owner not in ("os", "io") else 1)


def _mode(call: ast.Call, first: int) -> str:
    given = [key.value for key in call.keywords if key.arg == "mode"] + call.args[first : first + 1]
    modes = [value.value for value in given if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    return modes[0] if modes else "b" if given else "r"


@pytest.mark.parametrize("part", SHIPPED)
def test_shipped_code_names_the_encoding_of_text(part: str) -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{line}"
        for path in sorted((REPOSITORY / part).rglob("*.py"))
        for line in calls_without_encoding(path.read_text(encoding="utf-8"))
    ]
    assert not found, "write encoding='utf-8'"
