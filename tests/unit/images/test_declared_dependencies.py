"""Each part declares the distributions that its code imports, rather than rely on those of its dependencies."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PARTS = ("client", "crds", "images/probe", "memory", "operator", "tests/cluster", "trainer")
"""Parts with metadata of their own; `tests/support` runs in the development environment only."""
OWNERS = packages_distributions()


@pytest.mark.parametrize("part", PARTS)
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
