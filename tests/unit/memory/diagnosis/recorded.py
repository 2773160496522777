"""Recorded failures in tests/data/oom, as described in its README."""

from __future__ import annotations

from pathlib import Path

from rljob_memory.diagnosis import FailureClass

RECORDED = Path(__file__).parents[3] / "data" / "oom"


def recorded_failures() -> list[tuple[FailureClass, Path]]:
    """Each failure, a file or a folder, with its class."""
    return [(FailureClass(path.parent.name), path) for path in sorted(RECORDED.glob("*/*"))]


def recorded_texts() -> list[Path]:
    """Recorded failures that consist of a single text file."""
    return [path for _, path in recorded_failures() if path.is_file()]


def source_line(failure: Path) -> str:
    """`# source: …`"""
    file = failure / "source.txt" if failure.is_dir() else failure
    return file.read_text(encoding="utf-8").partition("\n")[0]
