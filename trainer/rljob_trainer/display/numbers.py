"""Formats numbers for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

_BARS = "▁▂▃▄▅▆▇█"
_GIB = 2**30


def clock(seconds: float) -> str:
    """`0:38`, `1:02:07`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def short_seconds(seconds: float) -> str:
    """`430 ms`, `1.2 s`, `2:05 min`: at most three digits."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    return f"{clock(seconds)} {'min' if seconds < 3600 else 'h'}"


def gibibytes(count: float) -> str:
    """Bytes as `1.24 GiB`."""
    return f"{count / _GIB:.2f} GiB"


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` as a bar chart of at most `width` characters, each the mean of its share, scaled to the range."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    buckets = min(width, len(finite))
    bounds = [len(finite) * bucket // buckets for bucket in range(buckets + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    if high == low:
        return _BARS[0] * buckets
    return "".join(_BARS[round((mean - low) / (high - low) * (len(_BARS) - 1))] for mean in means)
