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
        path = f"{directory}/{os.getpid()}.json"
        with open(f"{path}.part", "w", encoding="utf-8") as file:
            json.dump(evidence, file)
        os.replace(f"{path}.part", path)  # a process may be killed while it writes


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
    """The earliest recent note of another process that can be read; a process may discard its own at any time."""
    directory = os.environ.get(DIRECTORY, "")
    if not os.path.isdir(directory):
        return None
    oldest = time.time() - STALE_SECONDS
    names = [name for name in os.listdir(directory) if name.endswith(".json") and name != f"{os.getpid()}.json"]
    dated = [(_changed_at(path), path) for path in (f"{directory}/{name}" for name in names)]
    for changed_at, path in sorted(dated):
        note = _read(path) if changed_at > oldest else None
        if note is not None:
            return note
    return None


def _changed_at(path: str) -> float:
    """Seconds since the epoch; 0 if it is gone."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _read(path: str) -> Evidence | None:
    import json

    try:
        with open(path, encoding="utf-8") as file:
            note: Evidence = json.load(file)
            return note
    except (OSError, ValueError):
        return None
