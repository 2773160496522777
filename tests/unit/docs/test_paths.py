"""Files and folders that the documentation names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("[!.]*/README.md")])
FOLDERS = [
    *["bench", "charts", "crds", "docs", "examples", "images", "memory", "operator"],
    *["requirements", "scripts", "tests", "trainer"],
]
PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./{{}},*-]+)`")
PLACEHOLDER = re.compile(r"\b[A-Z]{2,}\b")
OF_A_RUN = re.compile(r"memory/(policy-0|\*)?(\.jsonl)?$")
"""The folder `memory/` of a run's output directory."""


def alternatives(path: str) -> list[str]:
    """`a/{b,c}/d` as `a/b/d` and `a/c/d`."""
    braces = re.search(r"\{([^}]*)\}", path)
    if not braces:
        return [path]
    return [path[: braces.start()] + option + path[braces.end() :] for option in braces[1].split(",")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    for path in PATH.findall(page.read_text(encoding="utf-8")):
        if PLACEHOLDER.search(path) or OF_A_RUN.match(path):
            continue
        for alternative in alternatives(path):
            assert list(ROOT.glob(alternative.rstrip("/"))), f"{alternative} does not exist"
