"""Memory events and limits of the container's cgroup, in versions 1 and 2."""

from __future__ import annotations

ROOT = "/sys/fs/cgroup"
_EVENTS = ("memory.events", "memory/memory.oom_control")
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
_NO_LIMIT_BYTES = 1 << 60
"""In version 1, a number of at least this size means that there is no limit."""


def oom_kills(root: str = ROOT) -> int:
    """Number of processes that the kernel's out-of-memory killer has killed in this cgroup. 0 if it is unknown."""
    for line in _first_readable(root, _EVENTS).splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill" and count.strip().isdigit():
            return int(count)
    return 0


def memory_limit_bytes(root: str = ROOT) -> int | None:
    """Memory limit of the cgroup. None if there is no limit, or it is unknown."""
    text = _first_readable(root, _LIMITS).strip()
    limit = int(text) if text.isdigit() else _NO_LIMIT_BYTES
    return limit if limit < _NO_LIMIT_BYTES else None


def _first_readable(root: str, names: tuple[str, ...]) -> str:
    for name in names:
        try:
            with open(f"{root}/{name}", encoding="utf-8", errors="replace") as file:
                return file.read()
        except OSError:
            continue
    return ""
