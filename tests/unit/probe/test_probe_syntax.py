"""The probe runs on Python 3.8 and later, and does no harm on any other Python."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

import pytest

import rljob_probe

PACKAGE = Path(rljob_probe.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_the_syntax_is_that_of_python_3_8(source: Path) -> None:
    oldest = (3, 4) if source.name == "sitecustomize.py" else (3, 8)
    ast.parse(source.read_text(), feature_version=oldest)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_newer_ways_to_write_types_are_never_evaluated(source: Path) -> None:
    tree = ast.parse(source.read_text())
    deferred = any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)
    annotated = any(isinstance(node, ast.AnnAssign) or getattr(node, "returns", None) for node in ast.walk(tree))
    assert deferred or not annotated


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_nothing_but_the_standard_library_is_imported(source: Path) -> None:
    allowed = set(sys.stdlib_module_names) | {"rljob_probe", "sitecustomize"}
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            assert {alias.name.partition(".")[0] for alias in node.names} <= allowed
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert node.module.partition(".")[0] in allowed


def test_it_depends_on_no_package() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == []
    assert project["requires-python"] == ">=3.8"
