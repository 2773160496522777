"""When a checkpoint is begun, made durable and pruned, beside the running steps.

The state is copied when a checkpoint begins and written while the next steps run. It counts once it has its final name;
only then does the journal let go of steps, and only of those that every checkpoint on disk covers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rljob_trainer.ledger.checkpoint_store import CheckpointStore
from rljob_trainer.ledger.journal import RolloutJournal
from rljob_trainer.roles.colocated import ColocatedRoles


@dataclass(slots=True)
class Checkpointing:
    roles: ColocatedRoles
    store: CheckpointStore
    journal: RolloutJournal
    every_steps: int
    warn: Callable[[str], None]
    _writing: int | None = field(default=None, init=False)

    def restore(self, committed: int) -> int:
        """Load the newest whole checkpoint, not newer than step `committed`; the step it is of, 0 where there is none."""
        found = self.store.latest_valid(through=committed)
        for problem in found.problems:
            self.warn(problem)
        if found.checkpoint is None:
            return 0
        self.roles.load_checkpoint(found.checkpoint.path)
        return found.checkpoint.step

    def advance(self, committed: int) -> None:
        """After step `committed`: name the checkpoint that has been written, begin one that is due."""
        due = committed > 0 and committed % self.every_steps == 0 and self.store.newest_step() != committed
        if self._writing is not None and (due or self.roles.checkpoint_written()):
            self._name_written()
        if due:
            self._begin(committed)

    def close(self, committed: int) -> None:
        """Make the state after step `committed` durable before the process ends."""
        if self._writing is not None:
            self._name_written()
        if committed > 0 and self.store.newest_step() != committed:
            self._begin(committed)
            self._name_written()

    def _begin(self, step: int) -> None:
        self.roles.start_checkpoint(self.store.begin(step))
        self._writing = step

    def _name_written(self) -> None:
        assert self._writing is not None
        self.roles.finish_checkpoint()
        self.store.commit(self._writing)
        # Older checkpoints are kept for the case that a newer one is corrupt, and so are the steps after the oldest.
        if self.store.count() >= self.store.keep:
            self.journal.discard_through(self.store.oldest_step())
        self._writing = None
