"""Checksums of checkpoints: each rank computes those of its own files, in parallel with the others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rljob_trainer.ledger.checkpoint_manifest import CheckpointManifest, FileDigest, digest_of, find_file_damage

_FILE_OF_RANK = re.compile(r"__(?P<rank>\d+)_.*")
"""Names that torch's writer of distributed checkpoints gives."""

_THREADS = 4


class WrittenDigests:
    """The checksums of the files that this rank has written, computed in the background."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-digests")
        self._digests: Future[dict[str, FileDigest]] | None = None

    def start(self, directory: Path, writing: Future[Any]) -> None:
        """Compute them once `writing` has ended. If it has failed, so does `take`."""

        def compute() -> dict[str, FileDigest]:
            writing.result()
            own = [path for path in sorted(directory.iterdir()) if _rank_of(path.name) == self._rank]
            with ThreadPoolExecutor(_THREADS) as threads:
                return dict(zip([path.name for path in own], threads.map(digest_of, own), strict=True))

        self._digests = self._executor.submit(compute)

    def done(self) -> bool:
        """True if `take` would return at once."""
        return self._digests is None or self._digests.done()

    def take(self) -> dict[str, FileDigest]:
        """The checksums by file name, when they are complete."""
        digests, self._digests = self._digests, None
        return {} if digests is None else digests.result()


def find_damage_of_share(directory: Path, rank: int, ranks: int) -> str | None:
    """A description of damage in the files that `rank` of `ranks` checks; None if they are as they were written.

    These are the files that it loads itself if the checkpoint has as many ranks: they are then read only once from a
    shared volume, since the second read finds them in the page cache.
    """
    files = CheckpointManifest.load(directory).files
    share = [name for place, name in enumerate(files) if _reader(name, place, ranks) == rank]
    with ThreadPoolExecutor(_THREADS) as threads:
        damages: Sequence[str | None] = list(
            threads.map(lambda name: find_file_damage(directory / name, name, files[name]), share)
        )
    return next((damage for damage in damages if damage), None)


def _rank_of(name: str) -> int | None:
    match = _FILE_OF_RANK.fullmatch(name)
    return int(match["rank"]) if match else None


def _reader(name: str, place: int, ranks: int) -> int:
    writer = _rank_of(Path(name).name)
    return (place if writer is None else writer) % ranks
