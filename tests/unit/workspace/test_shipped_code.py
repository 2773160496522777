"""The code: encodings, declared imports, class names; the mutants fit it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from rljob_testing.repository import ROOT
from tests.mutants.run import read_mutants

OWNERS = packages_distributions()
SHIPPED = ("crds", "memory", "client", "operator", "trainer", "charts", "images")


def uses_the_locale(call: ast.Call) -> bool:
    """True if the call reads or writes text in the encoding of the locale."""
    owner, _, name = ast.unparse(call.func).rpartition(".")
    keywords = {key.arg: key.value for key in call.keywords}
    if "encoding" in keywords:
        return False
    if owner == "subprocess":
        return bool(keywords.keys() & {"text", "universal_newlines"})
    if name in ("read_text", "write_text"):
        return bool(owner) and len(call.args) == (name == "write_text")
    if name not in ("open", "fdopen") or (name == "open" and owner in ("os", "tarfile", "zipfile", "Image")):
        return False
    place = 1 if owner in ("", "os", "io") else 0
    mode = keywords.get("mode", call.args[place] if len(call.args) > place else ast.Constant("r"))
    return isinstance(mode, ast.Constant) and isinstance(mode.value, str) and "b" not in mode.value


@pytest.mark.parametrize("part", SHIPPED)
def test_shipped_code_names_the_encoding_of_text(part: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / part).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and uses_the_locale(node)
    ]
    assert not found, "write encoding='utf-8'"


@pytest.mark.parametrize("part", ["crds", "client", "images/probe", "memory", "operator", "tests/cluster", "trainer"])
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


def test_no_two_classes_have_one_name() -> None:
    places = defaultdict(list)
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not {name: found for name, found in places.items() if len(found) > 1}, "rename one of them"


def test_documentation_opens_with_a_verb_or_a_noun() -> None:
    """A reader of "Of the job." has to look up the name before he understands the sentence."""
    vague = re.compile(r"(Of|As|On|At which|In which|What|Whether|How|Where|Who) ")
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value.value.splitlines()[0]}"
        for path in python_files()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if vague.match(node.value.value)
    ]
    assert not found, "begin with a verb or a noun: docs/style.md"


def python_files() -> Iterator[Path]:
    for part in (*SHIPPED, "bench", "tests"):
        yield from (ROOT / part).rglob("*.py")


def test_every_mutant_fits_its_file_and_names_tests_that_exist() -> None:
    mutants = read_mutants()
    assert len({mutant.bug for mutant in mutants}) == len(mutants)
    for mutant in mutants:
        assert mutant.tests
        assert all((ROOT / test.partition("::")[0]).exists() for test in mutant.tests)
