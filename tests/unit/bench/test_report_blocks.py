"""Pages with blocks that are generated from recorded results."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.report.blocks import BLOCKS, BLOCKS_OF_SEVERAL, UnknownBlock, fill
from rljob_testing.repository import ROOT

DOCS = sorted((ROOT / "docs").glob("*.md"))
MARK, END = "<!-- from bench/results/induced_failures.json -->\n", "<!-- end -->\n"


def test_only_the_block_of_a_page_changes() -> None:
    filled = fill(f"before\n{MARK}old\n{END}after\n")
    assert filled.startswith(f"before\n{MARK}")
    assert filled.endswith(f"{END}after\n")
    assert "old" not in filled
    assert "| Unknown | 2 | Unknown ×2 | 0.50 |" in filled
    assert fill(filled) == filled


def test_an_unknown_block_is_an_error() -> None:
    with pytest.raises(UnknownBlock, match="no_such_result"):
        fill(f"<!-- from bench/results/no_such_result.json -->\n{END}")


def test_a_block_of_several_results_reads_each_of_them() -> None:
    filled = fill(f"<!-- from bench/results/public_failures_*.json: every set -->\nold\n{END}")
    assert "| first | 2026-11-23 |" in filled
    assert "| thirteenth | 2026-11-25 |" in filled
    assert fill(filled) == filled


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_a_page_is_up_to_date(page: Path) -> None:
    text = page.read_text()
    assert fill(text) == text


def test_every_block_is_on_a_page() -> None:
    docs = "".join(page.read_text() for page in DOCS)
    for name in [*BLOCKS, *BLOCKS_OF_SEVERAL]:
        result, colon, block = name.partition(":")
        assert f"<!-- from bench/results/{result}.json{colon}{block} -->" in docs


def test_the_index_lists_every_program_and_every_result() -> None:
    index = (ROOT / "bench" / "README.md").read_text()
    programs = {path.stem for path in (ROOT / "bench" / "programs").glob("*.py")} - {"__init__"}
    results = {path.name for path in (ROOT / "bench" / "results").glob("*.json")}
    assert [name for name in programs | results if f"`{name}`" not in index] == []
