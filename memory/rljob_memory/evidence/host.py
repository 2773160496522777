"""What is known of the host's memory around a failure: the container's use, limit and kills, and /dev/shm."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rljob_memory.evidence.sizes import KIB, size_bytes

_NEARLY_FULL = 0.95
_LONGEST_FILE_BYTES = 1 << 14
_USED_FILES = frozenset({"memory.current", "memory.peak", "memory.usage_in_bytes", "memory.max_usage_in_bytes"})
_LIMIT_FILES = frozenset({"memory.max", "memory.limit_in_bytes"})
_NO_LIMIT_BYTES = 1 << 50
_DF = re.compile(
    r"^(?:tmpfs|shm|none|/dev/shm)\s+(?P<size>\d{1,15}[KMGT]?)\s+(?P<used>\d{1,15}(?:\.\d)?[KMGT]?)\s+"
    r"\d{1,15}(?:\.\d)?[KMGT]?\s+\d{1,3}%\s+/dev/shm\s*$"
)


@dataclass(frozen=True, slots=True)
class HostRecord:
    """Bytes; None where nothing tells. `used`: the most that was seen. `oom_kills`: by the kernel, of the container."""

    used_bytes: int | None = None
    limit_bytes: int | None = None
    oom_kills: int = 0
    shm_used_bytes: int | None = None
    shm_size_bytes: int | None = None

    @property
    def nearly_full(self) -> bool:
        return _is_nearly_full(self.used_bytes, self.limit_bytes)

    @property
    def shm_nearly_full(self) -> bool:
        return _is_nearly_full(self.shm_used_bytes, self.shm_size_bytes)

    def and_also(self, other: HostRecord) -> HostRecord:
        """Both, of the same container: the most that either saw in use, the latest that either knows of the rest."""
        return HostRecord(
            used_bytes=_most(self.used_bytes, other.used_bytes),
            limit_bytes=other.limit_bytes or self.limit_bytes,
            oom_kills=max(self.oom_kills, other.oom_kills),
            shm_used_bytes=_most(self.shm_used_bytes, other.shm_used_bytes),
            shm_size_bytes=other.shm_size_bytes or self.shm_size_bytes,
        )


NOTHING_KNOWN = HostRecord()


def read_cgroup_file(path: Path, stream: BinaryIO) -> HostRecord | None:
    """Of a copy of a cgroup's file, by its name; None where it is none, or has no number (`max`: no limit)."""
    if path.name not in _USED_FILES | _LIMIT_FILES:
        return None
    text = stream.read(_LONGEST_FILE_BYTES).strip()
    if not text.isdigit() or (number := int(text)) >= _NO_LIMIT_BYTES:
        return HostRecord()
    return HostRecord(used_bytes=number) if path.name in _USED_FILES else HostRecord(limit_bytes=number)


def shared_memory_of(line: str) -> HostRecord | None:
    """Of a line of `df`, with or without `-h`, about /dev/shm."""
    match = _DF.match(line)
    if match is None:
        return None
    return HostRecord(shm_used_bytes=_df_bytes(match["used"]), shm_size_bytes=_df_bytes(match["size"]))


def _df_bytes(text: str) -> int | None:
    """Without a unit, df counts KiB; with one it means the binary unit."""
    return int(text) * KIB if text.isdigit() else size_bytes(f"{text}iB")


def _is_nearly_full(used: int | None, limit: int | None) -> bool:
    return used is not None and limit is not None and used >= _NEARLY_FULL * limit > 0


def _most(one: int | None, other: int | None) -> int | None:
    return max((size for size in (one, other) if size is not None), default=None)
