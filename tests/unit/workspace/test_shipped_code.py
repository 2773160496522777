"""The shipped code: it names the encoding of text and declares what it imports. The mutants fit it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from rljob_testing.repository import ROOT
from tests.mutants.run import read_mutants

SHIPPED = ("crds", "memory", "operator", "trainer", "charts", "images")
OWNERS = packages_distributions()

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
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / part).rglob("*.py"))
        for line in calls_without_encoding(path.read_text(encoding="utf-8"))
    ]
    assert not found, "write encoding='utf-8'"


@pytest.mark.parametrize("part", ["crds", "images/probe", "memory", "operator", "tests/cluster", "trainer"])
def test_a_part_declares_the_distributions_that_it_imports(part: str) -> None:
    project = tomllib.loads((ROOT / part / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    required = [*project["dependencies"], *(name for extra in extras for name in extra)]
    declared = {normalized(re.split(r"[^\w.-]", name)[0]) for name in (*required, project["name"])}
    undeclared = {
        module: path for module, path in imported_modules(ROOT / part) if not distributions(module) & declared
    }
    assert not undeclared


def imported_modules(folder: Path) -> Iterator[tuple[str, str]]:
    """Top-level modules outside the standard library, and the file that imports them."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for name in names(node):
                if (module := name.partition(".")[0]) not in {*sys.stdlib_module_names, "sitecustomize"}:
                    yield module, str(path.relative_to(ROOT))


def names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []


def distributions(module: str) -> set[str]:
    """Distributions that have the module. A part's module is named like its distribution."""
    return {normalized(name) for name in OWNERS.get(module, [module])}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_mutant_fits_its_file_and_names_tests_that_exist() -> None:
    mutants = read_mutants()
    assert len({mutant.bug for mutant in mutants}) == len(mutants)
    for mutant in mutants:
        assert mutant.tests
        assert all((ROOT / test.partition("::")[0]).exists() for test in mutant.tests)
