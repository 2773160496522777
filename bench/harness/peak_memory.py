"""Peak of this process's resident set, from /proc."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path


def growth_of_peak(work: Callable[[], object]) -> int:
    """Bytes by which the peak of the resident set during `work` exceeds the resident set before.

    Memory that earlier work has freed is given back first: it would hide as much of the growth.
    """
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = reset_peak()
    work()
    return status_bytes("VmHWM") - before


def reset_peak() -> int:
    """Reset the peak of the resident set. Returns the current resident set, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
