"""Freed bytes of a live recovery, from the memory log of the rank that failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.programs.ranks_recover import freed_bytes

GIB = 1 << 30
FAULT = 60 * GIB
"""Held by the fault itself."""


def memory_log(directory: Path, *samples: tuple[int, str, int | None]) -> Path:
    """Of samples with step, phase and peak; on a CPU they have no peak."""
    lines: list[dict[str, Any]] = [
        {"step": step, "phase": phase} | ({} if peak is None else {"peak_allocated_bytes": peak})
        for step, phase, peak in samples
    ]
    (directory / "policy-1.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return directory / "policy-1.jsonl"


def test_freed_bytes_exclude_those_that_the_fault_itself_held(tmp_path: Path) -> None:
    log = memory_log(
        tmp_path,
        (1, "update", 50 * GIB),
        (2, "update", 28 * GIB),
        (2, "update", 30 * GIB),
        (2, "sync", 35 * GIB),
        (3, "update", 30 * GIB + FAULT),
        (3, "update", 21 * GIB),
        (4, "update", 20 * GIB),
        (4, "update", 18 * GIB),
        (4, "sync", 34 * GIB),
        (5, "update", 10 * GIB),
    )
    assert freed_bytes(log, "update", 3) == 10 * GIB
    assert freed_bytes(log, "sync", 3) == GIB


def test_a_larger_peak_after_the_change_is_not_hidden(tmp_path: Path) -> None:
    log = memory_log(tmp_path, (2, "sync", 30 * GIB), (3, "sync", 30 * GIB + FAULT), (4, "sync", 31 * GIB))
    assert freed_bytes(log, "sync", 3) == -GIB


def test_freed_bytes_are_unknown_on_a_cpu_and_without_both_steps(tmp_path: Path) -> None:
    cpu = memory_log(tmp_path, (2, "update", None), (3, "update", None), (4, "update", None))
    assert freed_bytes(cpu, "update", 3) is None
    last = memory_log(tmp_path, (2, "update", 30 * GIB), (3, "update", 30 * GIB + FAULT))
    assert freed_bytes(last, "update", 3) is None
