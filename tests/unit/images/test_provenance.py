"""Images name their commit, and nothing about the machine that built them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from image_build.provenance import revision, source


def git(repository: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(repository), *identity, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    for name in ("code.py", "notes.md"):
        (tmp_path / name).write_text("first\n")
        git(tmp_path, "add", name)
        git(tmp_path, "commit", "--quiet", "-m", name)
    return tmp_path


def test_the_revision_is_the_last_commit_that_touched_the_files(repository: Path) -> None:
    assert revision(repository, [repository / "code.py"]) == git(repository, "rev-parse", "HEAD~1")
    assert revision(repository, [repository / "notes.md"]) == git(repository, "rev-parse", "HEAD")


def test_uncommitted_changes_of_the_files_are_marked(repository: Path) -> None:
    (repository / "code.py").write_text("second\n")
    assert revision(repository, [repository / "code.py"]).endswith("-dirty")
    assert not revision(repository, [repository / "notes.md"]).endswith("-dirty")


def test_without_a_repository_the_revision_is_unknown(tmp_path: Path) -> None:
    assert revision(tmp_path, [tmp_path / "code.py"]) == "unknown"


@pytest.mark.parametrize(
    ("origin", "recorded"),
    [
        ("https://forge.example/rljob.git", "https://forge.example/rljob.git"),
        ("https://user:token@forge.example/rljob.git", ""),
        ("/home/someone/rljob", ""),
    ],
)
def test_only_a_public_address_is_recorded_as_the_source(repository: Path, origin: str, recorded: str) -> None:
    git(repository, "remote", "add", "origin", origin)
    assert source(repository) == recorded
