"""Checkpoints on disk. A directory `step-000010` is always completely written.

A checkpoint is written under a temporary name. `commit` lists its files with their checksums in `checkpoint.json`,
makes every byte durable, and renames the directory. Directories with other names are leftovers.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rljob_client.errors import OutputUnavailable
from rljob_client.run_directory.durable_files import (
    disk_full_message,
    free_bytes,
    sync_directory,
    write_atomically,
    writing,
)
from rljob_trainer.ledger.checkpoint_manifest import (
    MANIFEST_NAME,
    FileDigest,
    describe,
    find_damage,
)

_FINAL_NAME = re.compile(r"step-(?P<step>\d+)")
_INTERRUPTED_NAME = re.compile(r"step-\d+\.(partial-[\w-]+|discarded)")
_UNWANTED_NAME = re.compile(r"step-\d+\.(discarded|rejected)")


def written_steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints in a directory, which may not exist, in ascending order."""
    entries = directory.iterdir() if directory.is_dir() else ()
    names = (_FINAL_NAME.fullmatch(path.name) for path in entries if path.is_dir())
    return sorted(int(name["step"]) for name in names if name)


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """The result of a search for a checkpoint."""

    step: int
    """The newest valid one holds the state after this step; 0: there is none."""

    problems: list[str]
    """A message about each newer checkpoint that cannot be used."""


class CheckpointStore:
    """The newest `keep` checkpoints of a run. The controller uses it; the policy ranks write the files."""

    def __init__(self, directory: Path, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"expected to keep at least 1 checkpoint, found keep={keep}")
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.keep = keep
        # Processes of different pods have the same ids.
        self._writer = f"{os.getpid()}-{secrets.token_hex(4)}"

    # --- write ---

    def begin(self, step: int) -> Path:
        """Create an empty directory for the checkpoint of `step`, which becomes valid by `commit(step)`.

        Raises `OutputUnavailable` if the disk has no space for another checkpoint of the newest one's size.
        """
        self._require_room_for_another(step)
        path = self._partial_path(step)
        with writing(path):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        return path

    def commit(self, step: int, digests: Mapping[str, FileDigest] | None = None) -> Path:
        """Make the checkpoint of `begin(step)` durable and rename it; then prune old ones. Returns its directory.

        `digests`: those of files that their writers have computed. The other files are read.

        An existing checkpoint of the same step is kept: it was verified when the run started.
        """
        partial, final = self._partial_path(step), self._final_path(step)
        if final.exists():
            shutil.rmtree(partial)
        else:
            manifest = describe(partial, step, digests or {})
            write_atomically(partial / MANIFEST_NAME, manifest.to_json())
            with writing(final):
                _sync_tree(partial)
                partial.rename(final)
                sync_directory(self.directory)
        self._prune()
        return final

    # --- read ---

    def latest_valid(
        self, through: int | None = None, use: Callable[[Path, int], str | None] = find_damage
    ) -> FoundCheckpoint:
        """Find the newest checkpoint up to step `through` whose checksums match.

        `use`: uses the checkpoint of a step, unless it is damaged: a description of that; None if it was used. By
        default, this process reads all of its files.

        Newer ones are renamed to `step-….rejected` until the next commit, and listed in `problems`. Leftovers of
        interrupted writes are removed.
        """
        self._remove_matching(_INTERRUPTED_NAME)
        problems: list[str] = []
        for step in reversed(self._steps()):
            path = self._final_path(step)
            ahead = through is not None and step > through
            damage = f"it is ahead of the ledger, which ends at step {through}" if ahead else use(path, step)
            if damage is None:
                return FoundCheckpoint(step, problems)
            problems.append(f"the checkpoint of step {step} is not used: {damage}")
            self._set_aside(path)
        return FoundCheckpoint(0, problems)

    def count(self) -> int:
        return len(self._steps())

    def newest_step(self) -> int:
        """0 if there is no checkpoint."""
        return max(self._steps(), default=0)

    def oldest_step(self) -> int:
        """0 if there is no checkpoint."""
        return min(self._steps(), default=0)

    # --- internals ---

    def _final_path(self, step: int) -> Path:
        return self.directory / f"step-{step:06d}"

    def _partial_path(self, step: int) -> Path:
        # A rank of an attempt that is over may still be writing, also on a node that nobody reaches: it must not write
        # into the files of this attempt.
        return self.directory / f"step-{step:06d}.partial-{self._writer}"

    def _steps(self) -> list[int]:
        return written_steps(self.directory)

    def _prune(self) -> None:
        for step in self._steps()[: -self.keep]:
            path = self._final_path(step)
            path.rename(path.with_suffix(".discarded"))
        self._remove_matching(_UNWANTED_NAME)

    def _set_aside(self, path: Path) -> None:
        aside = path.with_suffix(".rejected")
        with writing(aside):
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            sync_directory(self.directory)

    def _remove_matching(self, pattern: re.Pattern[str]) -> None:
        for path in self.directory.iterdir():
            if pattern.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def _require_room_for_another(self, step: int) -> None:
        newest = self.newest_step()
        if not newest:
            return
        needed = sum(file.stat().st_size for file in self._final_path(newest).rglob("*") if file.is_file())
        if free_bytes(self.directory) < needed:
            raise OutputUnavailable(disk_full_message(self._final_path(step), needed))


def _sync_tree(root: Path) -> None:
    """Make every file and every directory under `root` durable."""
    for directory, _, names in os.walk(root):
        for name in names:
            with open(os.path.join(directory, name), "rb") as file:
                os.fsync(file.fileno())
        sync_directory(Path(directory))
