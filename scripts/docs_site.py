"""Hooks of mkdocs: the navigation is the table of docs/index.md; files outside of docs/ are links to the repository."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

_SECTION = re.compile(r"^\| \*\*(?P<title>.+?)\*\* \|")
_PAGE = re.compile(r"^\| \[(?P<title>[^]]+)\]\((?P<page>[\w-]+\.md)\)")
_LINK = re.compile(r"\[(?P<text>[^]\n]*(?:\n[^]\n]*)?)\]\((?P<path>\.\./[^)\s]+)\)")


def on_config(config: Any) -> None:
    index = (Path(config.docs_dir) / "index.md").read_text(encoding="utf-8")
    config.nav = navigation(index)


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    return with_repository_links(markdown, config.repo_url)


def navigation(index: str) -> list[dict[str, Any]]:
    """Sections and pages of the table in `index`."""
    sections: list[dict[str, Any]] = [{"Overview": "index.md"}]
    pages: list[dict[str, str]] = []
    for line in index.splitlines():
        if section := _SECTION.match(line):
            pages = []
            sections.append({section["title"]: pages})
        elif found := _PAGE.match(line):
            pages.append({found["title"]: found["page"]})
    return sections


def with_repository_links(markdown: str, repository: str | None) -> str:
    """`markdown`, whose links to files outside docs/ lead to `repository`; without one, their text remains."""

    def link(found: re.Match[str]) -> str:
        if not repository:
            return found["text"]
        return f"[{found['text']}]({repository.rstrip('/')}/blob/main/{posixpath.normpath(found['path'])[3:]})"

    return _LINK.sub(link, markdown)
