"""What the container's cgroup says about memory, in version 2 and version 1 of cgroups."""

from __future__ import annotations

ROOT = "/sys/fs/cgroup"
_EVENTS = ("memory.events", "memory/memory.oom_control")
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
_NO_LIMIT_BYTES = 1 << 60
"""Version 1 says that there is no limit by a number of this size."""


def oom_kills(root: str = ROOT) -> int:
    """Processes that the kernel has killed in this cgroup for want of memory. 0 where that is not to be known."""
    for line in _first_readable(root, _EVENTS).splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill" and count.strip().isdigit():
            return int(count)
    return 0


def memory_limit_bytes(root: str = ROOT) -> int | None:
    """None where there is no limit, or none to be known."""
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
