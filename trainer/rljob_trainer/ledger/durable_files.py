"""Files that are either whole on disk or not there, and disk failures in words that help."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rljob_trainer.errors import OutputUnavailable

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}


@contextmanager
def writing(path: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """Turn an `OSError` of the block, which writes `path`, into `OutputUnavailable` with the cause and the cure."""
    try:
        yield
    except OSError as error:
        raise OutputUnavailable(_explain(error, path, needed_bytes)) from error


def write_atomically(path: Path, data: bytes) -> None:
    """Write `path` so that it holds either its old content or all of `data`, also after a crash.

    Raises `OutputUnavailable` where it cannot be written; the old content is then still there.
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
    """Make the names inside the directory `path` durable: an fsynced file is lost if its name is not."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(path: Path) -> int:
    """Bytes that this user can still write on the file system of `path` or its nearest existing parent."""
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    status = os.statvfs(existing)
    return status.f_bavail * status.f_frsize


def disk_full_message(path: Path, needed_bytes: int | None) -> str:
    needed = f"{path} needs {needed_bytes:,} bytes" if needed_bytes is not None else f"{path} could not be written"
    return (
        f"the disk is full: {needed}, {free_bytes(path):,} are free. "
        "What was committed before is safe. Free some space and run the same command again."
    )


def _explain(error: OSError, path: Path, needed_bytes: int | None) -> str:
    if error.errno in _DISK_FULL:
        return disk_full_message(path, needed_bytes)
    cause = error.strerror or str(error)
    return f"{path} could not be written: {cause}. Make it writable for this user, or give another --output."
