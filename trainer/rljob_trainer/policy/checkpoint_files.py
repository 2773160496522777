"""The files of a checkpoint: a rank writes and reads several at a time, and each byte passes through it once.

The format is that of torch's distributed checkpoints. Checksums are computed from the bytes as they are written or
read, so a checkpoint that does not fit in the page cache is not read from disk a second time.
"""

from __future__ import annotations

import hashlib
import heapq
import io
import os
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import (
    DEFAULT_SUFFIX,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from rljob_trainer.hardware import visible_cores
from rljob_trainer.ledger.checkpoint_manifest import FileDigest, share_of_reader

FILE_BYTES = 256 << 20
"""A rank's share of the state is divided into more files only if each has as much."""
_MOST_THREADS = 8
_DURABLE_BYTES = 64 << 20
"""A file is made durable after each such part. On some file systems an fsync of another file waits for all data that is
not on the disk yet: probably therefore, rollouts took 2.3 s to save during a checkpoint of 7 GB."""


class DamagedCheckpoint(Exception):
    """A file is not as it was written."""


class ParallelWriter(FileSystemWriter):
    """Writes the share of a rank into several files at a time, and one item at a time into each.

    torch's own loop keeps every tensor that it has brought to host memory until the file is complete, and its threads
    (`thread_count`) lose their exceptions: a full disk would go unnoticed.
    """

    def __init__(self, directory: Path, abandoned: threading.Event | None = None) -> None:
        """`abandoned`: once it is set, the next item raises `RuntimeError`."""
        super().__init__(directory)
        self._directory = directory
        self._abandoned = abandoned or threading.Event()
        self.digests: dict[str, FileDigest] = {}
        """Checksums of the files that this rank has written."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Returns when the files are durable."""
        shares = _even_shares(plan.items, threads_for(sum(map(_item_bytes, plan.items))))
        names = [f"{plan.storage_data.prefix}{number}{DEFAULT_SUFFIX}" for number in range(len(shares))]
        with ThreadPoolExecutor(len(shares), thread_name_prefix="checkpoint-file") as threads:
            written = list(threads.map(lambda name, items: self._write(name, items, planner), names, shares))
        results: Future[list[WriteResult]] = Future()
        results.set_result([result for of_file in written for result in of_file])
        return results

    def _write(self, name: str, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        results: list[WriteResult] = []
        with (self._directory / name).open("wb") as file:
            hashed = _HashedFile(file)
            for item in items:
                if self._abandoned.is_set():
                    raise RuntimeError(
                        f"the checkpoint {self._directory} is abandoned: a rank that writes it has failed"
                    )
                offset = hashed.nbytes
                torch.save(_alone(planner.resolve_data(item)), cast(IO[bytes], hashed))
                length = hashed.nbytes - offset
                results.append(WriteResult(item.index, length, _StorageInfo(name, offset, length)))
            file.flush()
            os.fsync(file.fileno())
        self.digests[name] = FileDigest(size_bytes=hashed.nbytes, sha256=hashed.hash.hexdigest())
        return results


class VerifyingReader(FileSystemReader):
    """Reads what a rank needs, several files at a time.

    One rank reads each file of the state completely and verifies its checksum, usually the rank that needs all of it.
    The other ranks read only the items that they need.
    """

    def __init__(self, directory: Path, files: Mapping[str, FileDigest], rank: int, ranks: int) -> None:
        """`files`: those in the checkpoint's manifest."""
        super().__init__(directory)
        self._directory = directory
        self._files = files
        self._share = share_of_reader(files, rank, ranks)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Raises `DamagedCheckpoint`, perhaps after a part of the state has been loaded."""
        places: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for info in self.storage_data.values():
            places[info.relative_path].append((info.offset, info.length))
        if unlisted := sorted(places.keys() - self._files.keys()):
            raise DamagedCheckpoint(f"{unlisted[0]} is not listed in the manifest")
        wanted: dict[str, dict[int, list[ReadItem]]] = defaultdict(lambda: defaultdict(list))
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            wanted[info.relative_path][info.offset].append(item)

        def read(name: str) -> str | None:
            return self._read(name, sorted(places[name]), wanted[name], planner)

        names = sorted({*wanted, *self._share})
        with ThreadPoolExecutor(threads_for(None), thread_name_prefix="checkpoint-file") as threads:
            damages = list(threads.map(read, names))
        if damage := next((each for each in damages if each), None):
            raise DamagedCheckpoint(damage)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(
        self, name: str, places: Sequence[tuple[int, int]], wanted: Mapping[int, list[ReadItem]], planner: LoadPlanner
    ) -> str | None:
        """Load the items of one file, in its order. Returns a description of its damage, if it is of this rank's share.

        Of a damaged file, the error of an item that cannot be read does not matter.
        """
        failure: Exception | None = None
        checks, digest = name in self._share, hashlib.sha256()
        try:
            with (self._directory / name).open("rb") as file:
                for offset, length in places:
                    if not (checks or offset in wanted):
                        continue
                    file.seek(offset)
                    content = file.read(length)
                    if checks:
                        digest.update(content)
                    try:
                        for item in wanted.get(offset, ()) if failure is None else ():
                            _load(content, item, planner)
                    except Exception as error:
                        failure = error
                    del content  # before the next is read
                digest.update(file.read() if checks else b"")  # nothing, unless the file is damaged
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if checks and digest.hexdigest() != self._files[name].sha256:
            return f"{name} is corrupt (its checksum differs)"
        if failure is not None:
            raise failure
        return None


def threads_for(nbytes: int | None) -> int:
    """Files that a rank writes or reads at a time. `nbytes`: size of the state to divide; None: it is divided
    already."""
    most = max(1, min(_MOST_THREADS, visible_cores()))
    return most if nbytes is None else max(1, min(most, nbytes // FILE_BYTES))


class _HashedFile(io.RawIOBase):
    """A file that is written from its beginning to its end."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self._file = file
        self.hash = hashlib.sha256()
        self.nbytes = 0
        self._durable_bytes = 0

    def write(self, content: Any) -> int:
        self.hash.update(content)
        written = self._file.write(content)
        self.nbytes += written
        if self.nbytes - self._durable_bytes >= _DURABLE_BYTES:
            self._file.flush()
            os.fdatasync(self._file.fileno())
            self._durable_bytes = self.nbytes
        return written


def _alone(tensor: Any) -> Any:
    """A copy of `tensor` with its own storage: `torch.save` writes the whole storage of a view."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _load(content: bytes, item: ReadItem, planner: LoadPlanner) -> None:
    """Load the item from `content` like `FileSystemReader`. `BytesIO` shares its memory."""
    stored: torch.Tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        stored = stored.narrow(dim, start, length)
    target = planner.resolve_tensor(item).detach()
    if target.shape != stored.shape:
        raise ValueError(f"expected {list(target.shape)} numbers of {item.dest_index.fqn}, found {list(stored.shape)}")
    target.copy_(stored)
    planner.commit_tensor(item, target)


def _even_shares(items: Sequence[WriteItem], shares: int) -> list[list[WriteItem]]:
    """Shares of about as many bytes, at least one, which may be empty."""
    divided: list[list[WriteItem]] = [[] for _ in range(shares)]
    smallest = [(0, number) for number in range(shares)]
    for item in sorted(items, key=_item_bytes, reverse=True):
        nbytes, number = smallest[0]
        divided[number].append(item)
        heapq.heapreplace(smallest, (nbytes + _item_bytes(item), number))
    return divided


def _item_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    if data is None or data.chunk is None:
        return 0
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize
