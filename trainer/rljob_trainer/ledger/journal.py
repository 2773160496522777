"""The scored rollouts of the steps that no checkpoint covers yet, from which committed updates are replayed."""

from __future__ import annotations

import re
import zipfile
import zlib
from pathlib import Path

from rljob_client.errors import OutputUnavailable
from rljob_client.run_directory.durable_files import writing
from rljob_trainer.rollout_batch import RolloutBatch

_DAMAGE = (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error)
_FILE_NAME = re.compile(r"step-(?P<step>\d+)\.npz(\.partial)?")


class RolloutJournal:
    """One file per step, `step-000011.npz`. A corrupt file counts as absent until its step is committed."""

    def __init__(self, directory: Path) -> None:
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory

    def save(self, batch: RolloutBatch) -> None:
        """Write the batch durably. Raises `OutputUnavailable` if the disk is full, and then leaves no file."""
        batch.save(self._path(batch.step))

    def find(self, step: int) -> RolloutBatch | None:
        """The rollouts of the step; None if there are none, or if their file is damaged."""
        try:
            batch = RolloutBatch.load(self._path(step))
        except _DAMAGE:
            return None
        return batch if batch.step == step else None

    def load(self, step: int) -> RolloutBatch:
        """The rollouts of a committed step.

        Raises `OutputUnavailable` if they are missing or corrupt: a committed step cannot be generated again.
        """
        path = self._path(step)
        try:
            batch = RolloutBatch.load(path)
        except _DAMAGE as error:
            found = "missing" if isinstance(error, FileNotFoundError) else f"corrupt ({error})"
            raise _not_replayable(path, step, found) from error
        if batch.step != step:
            raise _not_replayable(path, step, f"of step {batch.step}")
        return batch

    def discard_through(self, step: int) -> None:
        """Delete all steps up to and including `step`, and leftovers of interrupted writes."""
        for path in self.directory.iterdir():
            if (found := _FILE_NAME.fullmatch(path.name)) and int(found["step"]) <= step:
                path.unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:06d}.npz"


def _not_replayable(path: Path, step: int, found: str) -> OutputUnavailable:
    return OutputUnavailable(
        f"expected the rollouts of the committed step {step} in {path}, found the file {found}. They are needed to "
        "replay the update, since no checkpoint covers it. Restore the file from a copy, or start over with another "
        "--output."
    )
