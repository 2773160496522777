"""Extraction of a tar stream, all or nothing."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path
from typing import IO

from rljob_client.errors import OutputUnavailable

_END = bytes(1024)
"""Every complete archive ends with two blocks of zeros. A stream that was cut between two files has none."""


class IncompleteArchive(Exception):
    """The stream ended early, or is no archive."""


class _Tail:
    """A stream that remembers its last bytes."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.last = b""

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self.last = (self.last + data)[-len(_END) :]
        return data


def require_free(directory: Path) -> None:
    """Raise OutputUnavailable unless `directory` does not exist or is empty."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise OutputUnavailable(
            f"expected no directory {directory}, or an empty one, found files; give another --output"
        )


def extract(stream: IO[bytes], name: str, directory: Path) -> int:
    """Extract the directory `name` of the archive (`.`: all of it) as `directory`, and return the bytes of its files.

    `directory` exists only if the archive was complete. Raises IncompleteArchive and OutputUnavailable. Links and
    paths out of the directory are refused (PEP 706).
    """
    partial = directory.with_name(f"{directory.name}.partial")
    size = 0
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        tail = _Tail(stream)
        with tarfile.open(fileobj=tail, mode="r|") as archive:  # type: ignore[call-overload]
            for member in archive:
                archive.extract(member, partial, filter="data")
                size += member.size
        while tail.read(1 << 16):
            pass
        if tail.last != _END:
            raise IncompleteArchive("the stream ended early")
        source = partial if name == "." else partial / name
        if not source.is_dir():
            raise IncompleteArchive(f"it has no directory {name}")
        if directory.exists():
            directory.rmdir()
        source.rename(directory)
    except tarfile.TarError as error:
        raise IncompleteArchive(str(error)) from error
    except OSError as error:
        raise OutputUnavailable(f"cannot write {directory}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return size
