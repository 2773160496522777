"""Notes about GPU out-of-memory errors, for processes that exit before they can report them.

Each process has one file in the directory RLJOB_PROBE_NOTES. Without that variable, a process only has its own note.
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
"""Maximum age of a note: longer than ranks wait for a lost one, which NCCL ends after ten minutes."""

_own: tuple[int, Evidence] | None = None
"""Process id, which differs in a forked process, and the note."""


def save(evidence: Evidence) -> None:
    """Save the note of this process, in place of an earlier one."""
    global _own
    _own = (os.getpid(), evidence)
    directory = os.environ.get(DIRECTORY)
    if directory:
        import json

        os.makedirs(directory, exist_ok=True)
        with open(f"{directory}/{os.getpid()}.json", "w", encoding="utf-8") as file:
            json.dump(evidence, file)


def discard() -> None:
    """Discard the note of this process, which continued after the error."""
    global _own
    _own = None
    directory = os.environ.get(DIRECTORY)
    if directory:
        os.remove(f"{directory}/{os.getpid()}.json")


def has_any() -> bool:
    """True if any process has saved a note."""
    directory = os.environ.get(DIRECTORY)
    return _own is not None or bool(directory and os.path.isdir(directory) and os.listdir(directory))


def own() -> Evidence | None:
    return _own[1] if _own is not None and _own[0] == os.getpid() else None


def earliest_of_others() -> Evidence | None:
    """The earliest recent note of another process."""
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
