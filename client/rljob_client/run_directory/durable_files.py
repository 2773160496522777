"""Atomic, durable writes, and helpful messages for disk failures."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rljob_client.errors import OutputUnavailable

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a disk, or of a quota, without space."""

_FULL_BELOW_BYTES = 2**20
"""A failed writer may leave less than a block, or some pages of its last file."""


@contextmanager
def writing(path: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """Raise `OutputUnavailable`, with cause and advice, for an `OSError` of the block, which writes `path`."""
    try:
        yield
    except OSError as error:
        raise OutputUnavailable(_explain(error, path, needed_bytes)) from error


def write_atomically(path: Path, data: bytes | memoryview) -> None:
    """Write `path` so that it has either its old content or all of `data`, even after a crash.

    Raises `OutputUnavailable` if it cannot be written; the old content then remains.
    """
    partial = path.with_name(path.name + ".partial")
    with writing(path, len(data)):
        try:
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in the directory `path` durable. Without its name, even an fsynced file is lost."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(path: Path) -> int:
    """Free bytes for this user on the file system of `path` or of its nearest existing parent."""
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    status = os.statvfs(existing)
    return status.f_bavail * status.f_frsize


def is_disk_full(path: Path) -> bool:
    """True if the disk of `path` has practically no space, which explains a failure without a clear cause."""
    return free_bytes(path) < _FULL_BELOW_BYTES


def disk_full_message(path: Path, needed_bytes: int | None = None) -> str:
    needed = f"{path} needs {needed_bytes:,} bytes" if needed_bytes is not None else f"{path} could not be written"
    return f"the disk is full: {needed}, {free_bytes(path):,} are free. Committed steps are safe. Free some space."


def _explain(error: OSError, path: Path, needed_bytes: int | None) -> str:
    if error.errno in DISK_FULL:
        return disk_full_message(path, needed_bytes)
    cause = error.strerror or str(error)
    return f"{path} could not be written: {cause}. Make it writable for this user, or give another --output."


def require_free(directory: Path) -> None:
    """Raise OutputUnavailable unless `directory` does not exist or is empty."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise OutputUnavailable(
            f"expected no directory {directory}, or an empty one, found files; give another --output"
        )
