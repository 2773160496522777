"""Messages that the troubleshooting tables quote are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CODE = "".join(path.read_text() for part in ("operator", "trainer") for path in sorted((ROOT / part).rglob("*.py")))
SHORTEST_MESSAGE = 8


def quoted(page: str) -> list[str]:
    """Parts of messages in the first column of the table under "Troubleshooting", cut at what varies."""
    section = (ROOT / "docs" / page).read_text(encoding="utf-8").split("## Troubleshooting\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")]
    messages = [message for cell in cells for message in re.findall(r"`([^`]*)`", cell) if " " in message]
    parts = [part.strip() for message in messages for part in re.split(r"…|\d+|digits\S*", message)]
    return [part for part in parts if len(part) >= SHORTEST_MESSAGE]


def test_quotes_are_found() -> None:
    assert "leadership lost, exiting" in quoted("operator.md")
    assert "still waiting for" in quoted("trainer-in-pods.md")


@pytest.mark.parametrize("page", ["operator.md", "trainer-in-pods.md"])
def test_quoted_messages_are_in_the_code(page: str) -> None:
    of_the_system = {"Connection refused", "Name or service not known", "forbidden"}
    code = re.sub(r"\{[^{}]*\}", "", CODE)
    for part in quoted(page):
        words = part.removesuffix("rljob.dev").strip()
        assert words in code or words in of_the_system, f"the code has no message {words!r}"
