"""Commit and repository of an image."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path


def revision(repository: Path, files: Sequence[Path]) -> str:
    """The last commit that changed one of the files, with `-dirty` if one differs from it; "unknown" without git.

    An image whose files did not change keeps its revision, and with it its id, from commit to commit.
    """
    names = [str(file) for file in files]
    commit = _git(repository, "log", "-1", "--format=%H", "--", *names)
    if not commit:
        return "unknown"
    return f"{commit}-dirty" if _git(repository, "status", "--porcelain", "--", *names) else commit


def source(repository: Path) -> str:
    """Public URL of the repository; empty if `origin` is a path or contains credentials."""
    origin = _git(repository, "remote", "get-url", "origin")
    return origin if re.fullmatch(r"https://[^@\s]+", origin) else ""


def _git(repository: Path, *arguments: str) -> str:
    try:
        git = subprocess.run(
            ["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=False, encoding="utf-8"
        )
    except FileNotFoundError:
        return ""
    return git.stdout.strip() if git.returncode == 0 else ""
