"""Build of the programs: complete programs or none."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from rljob_cluster.binaries import MODULES, Module
from rljob_cluster.build import build
from rljob_cluster.errors import ClusterError
from rljob_cluster.progress import Progress

TWO = Module("etcd", {"one": "example.com/one", "two": "example.com/two"})


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake `go` that runs a script of the test."""
    program = tmp_path / "path" / "go"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    return program


def script(program: Path, text: str) -> None:
    program.write_text(f"#!/bin/sh\nfor word; do last=$output; output=$previous; previous=$word; done\n{text}\n")
    program.chmod(0o755)


def progress() -> tuple[Progress, io.StringIO]:
    printed = io.StringIO()
    return Progress(Console(file=printed)), printed


def test_programs_are_built_one_by_one_with_progress(go: Path, tmp_path: Path) -> None:
    script(go, 'echo built > "$output"')
    reporter, printed = progress()
    build([TWO], tmp_path / "bin", reporter)
    assert {path.name for path in (tmp_path / "bin").iterdir()} == {"one", "two"}
    assert "building one, 1 of 2" in printed.getvalue()


def test_existing_programs_are_not_built_again(go: Path, tmp_path: Path) -> None:
    script(go, "exit 1")
    for name in TWO.programs:
        (tmp_path / name).touch()
    build([TWO], tmp_path, progress()[0])


def test_a_failed_build_shows_the_reason_and_leaves_no_files(go: Path, tmp_path: Path) -> None:
    script(go, 'echo half > "$output"; echo "undefined: x" >&2; exit 1')
    with pytest.raises(ClusterError, match="undefined: x"):
        build([TWO], tmp_path / "bin", progress()[0])
    assert list((tmp_path / "bin").iterdir()) == []


def test_without_go_the_error_names_the_required_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match=r"Go toolchain, 1\.26 or newer"):
        build(MODULES, tmp_path / "bin", progress()[0])
