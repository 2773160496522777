"""Links between the pages have targets, and the index links to every page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("[!.]*/README.md")])
CODE_BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def text_of(page: Path) -> str:
    return CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))


def links_of(page: Path) -> list[tuple[Path, str]]:
    """Target file and anchor of each relative link; the anchor is empty if the link has none."""
    targets = re.findall(r"\]\(([^)\s]+)\)", text_of(page))
    relative = [target.partition("#") for target in targets if "://" not in target]
    return [((page.parent / file).resolve() if file else page, anchor) for file, _, anchor in relative]


def anchors_of(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for file, anchor in links_of(page):
        assert file.exists(), f"{file} does not exist"
        if anchor and file.suffix == ".md":
            assert anchor in anchors_of(file), f"{file.name} has no heading for #{anchor}"


def test_the_index_links_to_every_page() -> None:
    linked = {file for file, _ in links_of(DOCS / "index.md")}
    assert {page for page in DOCS.glob("*.md") if page.name != "index.md"} <= linked
