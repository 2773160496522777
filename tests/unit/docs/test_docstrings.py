"""Docstrings and names of tests follow docs/style.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PARTS = ["crds", "memory", "operator", "trainer", "probe", "cluster", "images", "charts", "testing", "bench", "tests"]
FILES = sorted(path for part in PARTS for path in (ROOT / part).rglob("*.py"))
QUESTION_WORDS = ("What", "Whether", "How", "Where", "Who", "Which")


def string_statements(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, also of those below a field."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


@pytest.mark.parametrize("part", PARTS)
def test_no_docstring_opens_with_a_question_word(part: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in FILES
        if file.is_relative_to(ROOT / part)
        for line, text in string_statements(file.read_text(encoding="utf-8"))
        if text.split(maxsplit=1)[:1] and text.split(maxsplit=1)[0].strip(",:") in QUESTION_WORDS
    ]
    assert found == []


def test_names_of_tests_are_short() -> None:
    found = [
        node.name
        for file in FILES
        if file.is_relative_to(ROOT / "tests")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and len(node.name) > 70
    ]
    assert found == []
