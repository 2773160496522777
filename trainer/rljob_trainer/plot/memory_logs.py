"""Reads the memory logs of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from rljob_memory.sample import MemorySample


def logged_samples(directory: Path) -> Iterator[tuple[str, MemorySample]]:
    """Every sample of every log `<role>-<rank>.jsonl` in `directory`, with its actor (`policy-0`).

    Skips a line that is being written, or was torn by a kill. A line without `began` covers the time since the line
    before it.
    """
    for path in sorted(directory.glob("*-*.jsonl")):
        last_time = None
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    value = json.loads(line)
                except ValueError:
                    continue
                sample = MemorySample.from_line({"began": last_time, **value}) if isinstance(value, dict) else None
                if sample is not None:
                    last_time = sample.time
                    yield path.stem, sample
