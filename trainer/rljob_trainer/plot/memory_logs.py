"""The lines of a run's memory logs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def logged_samples(directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every whole line of every log `<role>-<rank>.jsonl` in `directory`, with its actor (`policy-0`).

    A line that is being written, or was torn by a kill, is passed over.
    """
    for path in sorted(directory.glob("*-*.jsonl")):
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    sample = json.loads(line)
                except ValueError:
                    continue
                if isinstance(sample, dict):
                    yield path.stem, sample
