"""What each process of the container notes when a GPU has no memory for it: it may end without a chance to tell.

One file a process, under the directory that RLJOB_PROBE_NOTES names; without it, a process knows of its own alone.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Evidence = dict[str, Any]

DIRECTORY = "RLJOB_PROBE_NOTES"
STALE_SECONDS = 900
"""Longer than ranks wait for one that is gone: NCCL ends them after ten minutes."""

_own: tuple[int, Evidence] | None = None
"""Pid, which tells a forked process that it is not its own, and what was noted."""


def leave(evidence: Evidence) -> None:
    """In place of the one that this process left before."""
    global _own
    _own = (os.getpid(), evidence)
    directory = os.environ.get(DIRECTORY)
    if directory:
        import json

        os.makedirs(directory, exist_ok=True)
        with open(f"{directory}/{os.getpid()}.json", "w", encoding="utf-8") as file:
            json.dump(evidence, file)


def forget() -> None:
    """This process has outlived it."""
    global _own
    _own = None
    directory = os.environ.get(DIRECTORY)
    if directory:
        os.remove(f"{directory}/{os.getpid()}.json")


def left() -> bool:
    """Whether any process has left one."""
    directory = os.environ.get(DIRECTORY)
    return _own is not None or bool(directory and os.path.isdir(directory) and os.listdir(directory))


def own() -> Evidence | None:
    return _own[1] if _own is not None and _own[0] == os.getpid() else None


def earliest_of_others() -> Evidence | None:
    """The earliest that another process left lately."""
    directory = os.environ.get(DIRECTORY, "")
    if not os.path.isdir(directory):
        return None
    paths = [entry.path for entry in os.scandir(directory) if entry.name != f"{os.getpid()}.json"]
    fresh = [path for path in paths if time.time() - os.stat(path).st_mtime < STALE_SECONDS]
    if not fresh:
        return None
    import json

    with open(min(fresh, key=lambda path: os.stat(path).st_mtime), encoding="utf-8") as file:
        evidence: Evidence = json.load(file)
        return evidence
