"""Models whose files are in memory, such as those in `/dev/shm`: a copy of their weights would be a second one."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_IN_MEMORY = {"tmpfs", "ramfs"}


def is_in_memory(directory: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """True if the file system of `directory` is in memory. False if that is not known.

    `mounts`: the table of file systems, in the format of fstab(5); the last entry of a directory covers the others.
    """
    kinds: dict[str, str] = {}
    with suppress(OSError):
        for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
            _, place, kind, *_ = [*line.split(), "", "", ""]
            kinds[place.replace("\\040", " ")] = kind
    path = Path(os.path.realpath(directory))
    return next((kinds[str(place)] in _IN_MEMORY for place in (path, *path.parents) if str(place) in kinds), False)
