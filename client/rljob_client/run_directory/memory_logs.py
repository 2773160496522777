"""Reads the memory logs of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rljob_memory.sample import MemorySample

_LAST_LINES_BYTES = 64 << 10


def old_log(path: Path) -> Path:
    """The file with the samples before those of the memory log `path`."""
    return path.with_name(f"{path.name}.old")


def logged_samples(directory: Path) -> Iterator[tuple[str, MemorySample]]:
    """Every sample of every log `<role>-<rank>.jsonl` in `directory`, with its actor (`policy-0`).

    Skips a line that is being written, or was torn by a kill. A line without `began` covers the time since the line
    before it.
    """
    for path in sorted(directory.glob("*-*.jsonl")):
        last_time = None
        for part in (old_log(path), path):
            for line in _lines(part):
                sample = _sample(line, began=last_time)
                if sample is not None:
                    last_time = sample.time
                    yield path.stem, sample


def _lines(log: Path) -> Iterator[bytes]:
    with suppress(FileNotFoundError), log.open("rb") as lines:
        yield from lines


def latest_samples(log: Path) -> Iterator[MemorySample]:
    """The last samples of one memory log, the latest first; none if there is no such log."""
    with suppress(OSError):
        with log.open("rb") as file:
            file.seek(max(log.stat().st_size - _LAST_LINES_BYTES, 0))
            lines = file.read().splitlines()
        for line in reversed(lines):
            sample = _sample(line)
            if sample is not None:
                yield sample


def _sample(line: bytes, began: float | None = None) -> MemorySample | None:
    try:
        value = json.loads(line.decode("utf-8", "replace"))
    except ValueError:
        return None
    return MemorySample.from_line({"began": began, **value}) if isinstance(value, dict) else None
