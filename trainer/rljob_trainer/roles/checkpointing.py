"""Schedules checkpoints: when one is started, made durable, and pruned, while steps run.

The state is copied when a checkpoint starts, and written during the next steps. A checkpoint is valid once it has its
final name. Only then does the journal discard steps, and only those that every checkpoint on disk covers.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from rljob_client.errors import RunError
from rljob_trainer.ledger.checkpoint_manifest import find_damage, writer_of
from rljob_trainer.ledger.checkpoint_store import CheckpointStore
from rljob_trainer.ledger.journal import RolloutJournal
from rljob_trainer.roles.roles import Roles


@dataclass(slots=True)
class Checkpointing:
    """The checkpoints of one attempt."""

    roles: Roles
    store: CheckpointStore
    journal: RolloutJournal

    every_steps: int
    """Checkpoint after every this many steps."""

    warn: Callable[[str], None]
    """Displays a warning."""

    on_begin: Callable[[int], None] = lambda _step: None
    """Called with the step of each checkpoint before it starts."""

    _writing: int | None = field(default=None, init=False)
    _naming: Future[Path] | None = field(default=None, init=False)
    _background: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1), init=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        """Wait for the rename in progress, so that another attempt finds the directory in its final state."""
        self._background.shutdown(wait=True)

    @property
    def writing(self) -> bool:
        """True if the ranks may be writing a checkpoint."""
        return self._writing is not None and self._naming is None

    def restore(self, committed: int) -> int:
        """Load the newest valid checkpoint up to step `committed`. Returns its step, or 0 if there is none.

        In the latter case, `roles.policy_at` is None if a part of a damaged one was loaded.
        """
        found = self.store.latest_valid(through=committed, use=self._load)
        for problem in found.problems:
            self.warn(problem)
        return found.step

    def advance(self, committed: int) -> None:
        """Advance the checkpoint in progress after step `committed`, and start one if it is due."""
        due = committed > 0 and committed % self.every_steps == 0 and self.store.newest_step() != committed
        if self.writing and (due or self.roles.checkpoint_written()):
            self._begin_naming()
        if due or (self._naming is not None and self._naming.done()):
            self._end_naming()
        if due:
            self._begin_writing(committed)

    def close(self, committed: int) -> None:
        """Make the state after step `committed` durable, before the process exits."""
        self.settle()
        if committed > 0 and self.store.newest_step() != committed:
            self._begin_writing(committed)
            self.settle()

    def keep_if_written(self) -> None:
        """Keep the checkpoint in progress if it is written, otherwise drop it. Call it when the ranks form a new
        group."""
        with suppress(RunError):
            if self.writing and self.roles.checkpoint_written():
                self._begin_naming()
        self.abandon()

    def abandon(self) -> None:
        """Drop a checkpoint whose writing failed or whose writers have exited. A complete one is still named."""
        self._end_naming()
        self._writing = None

    def settle(self) -> None:
        """Wait until the checkpoint in progress is durable."""
        if self.writing:
            self._begin_naming()
        self._end_naming()

    def _begin_writing(self, step: int) -> None:
        self.on_begin(step)
        self.roles.start_checkpoint(self.store.begin(step))
        self._writing = step

    def _begin_naming(self) -> None:
        """Wait until the files are written, and begin to give the checkpoint its final name."""
        assert self._writing is not None
        digests = self.roles.finish_checkpoint()
        self._naming = self._background.submit(self.store.commit, self._writing, digests=digests)

    def _load(self, path: Path, step: int) -> str | None:
        """Load a checkpoint, or describe its damage. The ranks check their files while they load them."""
        damage = find_damage(path, step, reads=lambda name: writer_of(name) is None)
        return damage or self.roles.load_checkpoint(path, step)

    def _end_naming(self) -> None:
        """Wait for the final name, if the checkpoint is getting it."""
        if self._naming is None:
            return
        self._naming.result()
        self._writing = self._naming = None
        # Older checkpoints are kept in case a newer one is corrupt, and so are the steps after the oldest.
        if self.store.count() >= self.store.keep:
            self.journal.discard_through(self.store.oldest_step())
