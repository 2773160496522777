"""Host memory around a failure: use and limit from copies of cgroup files."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from rljob_memory.sample import MemorySample

_NEARLY_FULL = 0.95
"""Share of the limit from which memory in use has reached it."""
_LONGEST_FILE_BYTES = 1 << 14
_USED_FILES = frozenset({"memory.current", "memory.peak", "memory.usage_in_bytes", "memory.max_usage_in_bytes"})
_LIMIT_FILES = frozenset({"memory.max", "memory.limit_in_bytes"})
_NO_LIMIT_BYTES = 1 << 50


def merged(one: MemorySample, other: MemorySample) -> MemorySample:
    """Host memory of the same container in both: the most that was in use, the latest value of every other number."""
    return MemorySample(
        host_used_bytes=max(one.host_used_bytes, other.host_used_bytes),
        host_limit_bytes=other.host_limit_bytes or one.host_limit_bytes,
        oom_kills=max(one.oom_kills, other.oom_kills),
        shared_memory_used_bytes=max(one.shared_memory_used_bytes, other.shared_memory_used_bytes),
        shared_memory_bytes=other.shared_memory_bytes or one.shared_memory_bytes,
    )


def is_nearly_full(used_bytes: int, limit_bytes: int) -> bool:
    """False if the limit is 0, which means unknown."""
    return used_bytes >= _NEARLY_FULL * limit_bytes > 0


def read_cgroup_file(path: Path, stream: BinaryIO) -> MemorySample | None:
    """The number in a copy of a cgroup's file, by its name; None for other files. A limit of `max` is left 0."""
    if path.name not in _USED_FILES | _LIMIT_FILES:
        return None
    text = stream.read(_LONGEST_FILE_BYTES).strip()
    if not text.isdigit() or (number := int(text)) >= _NO_LIMIT_BYTES:
        return MemorySample()
    if path.name in _USED_FILES:
        return MemorySample(host_used_bytes=number)
    return MemorySample(host_limit_bytes=number)
