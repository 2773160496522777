"""The phases of the steps, which are retried after a failure.

Each phase declares the step whose weights it needs in the policy and in the engines. Roles that a failure has ended are
brought to that state before the phase is retried, as they are at the start of an attempt: the policy loads the newest
checkpoint, and replays the later updates from the journal.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from rljob_api.plan_change import Phase
from rljob_client.errors import RunError
from rljob_client.run_directory.ledger import Ledger
from rljob_client.run_directory.records import ReadyRecord, RestoreRecord
from rljob_trainer.display.run_display import RunDisplay
from rljob_trainer.ledger.journal import RolloutJournal
from rljob_trainer.phase_clock import PartClock
from rljob_trainer.recovery.early_warning import EarlyWarning
from rljob_trainer.recovery.fault_schedule import FaultSchedule
from rljob_trainer.recovery.phase_deadlines import PhaseDeadlines
from rljob_trainer.recovery.recovery import Recovery
from rljob_trainer.roles.checkpointing import Checkpointing
from rljob_trainer.roles.roles import Roles
from rljob_trainer.rollout_batch import RolloutBatch
from rljob_trainer.run_listener import RunListener
from rljob_trainer.runtime.step_health import require_same_updates

Result = TypeVar("Result")


@dataclass(slots=True)
class Phases:
    """Runs the phases of one attempt."""

    attempt: int
    roles: Roles
    ledger: Ledger
    journal: RolloutJournal
    checkpointing: Checkpointing
    recovery: Recovery
    faults: FaultSchedule
    deadlines: PhaseDeadlines
    early_warning: EarlyWarning
    display: RunDisplay
    listener: RunListener
    on_replay: Callable[[RolloutBatch], None]
    """Called with the rollouts of each update that is replayed."""
    _phase: Phase | None = field(default=None, init=False)
    _checkpoint_step: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.recovery.save = self.save

    def start(self) -> None:
        """Bring the policy to the state after the last committed step, and its weights to the engines."""
        step, last = self.ledger.next_step, self.ledger.last_step
        self.until_done(step, partial(self._make_ready, step, last, last))
        self._record_ready()

    def save(self, last: int) -> None:
        """Write a checkpoint of the state after the committed step `last`, and wait for it."""
        self.do(max(last, 1), "checkpoint", PartClock(), partial(self.checkpointing.close, last), policy_at=last)

    def do(
        self,
        step: int,
        phase: Phase,
        clock: PartClock,
        work: Callable[[], Result],
        *,
        policy_at: int | None,
        engines_at: int | None = None,
        of_step: bool = True,
        times_usual: float = 1.0,
    ) -> Result:
        """Run a phase of `step`; recover and retry if it fails.

        `policy_at`: the step after which the phase needs the policy; None: any. `engines_at`: the step whose weights it
        needs in the engines; None: any. `of_step`: False for work between two steps, which no fault of the job is for.
        `times_usual`: amount of work, compared with that of the phase in a step.
        """

        def attempted() -> Result:
            self._make_ready(step, policy_at, engines_at)
            self.begin(step, phase)
            limit = self.deadlines.limited(phase, writing=self.checkpointing.writing, times=times_usual)
            with clock.part(phase), limit:
                if of_step:
                    self.faults.inject(step, phase)
                result = work()
            self.deadlines.done(phase)
            return result

        return self.until_done(step, attempted)

    def until_done(self, step: int, work: Callable[[], Result]) -> Result:
        """Call `work`; recover and repeat it if it fails. A failure counts for the phase that began last."""
        while True:
            try:
                result = work()
            except RunError as failure:
                self.recovery.recover(failure, step, self._phase)
                self.early_warning.forget()
            else:
                self.recovery.phase_done(step, self._phase)
                if self.recovery.renewed:
                    self._record_ready()
                return result

    def begin(self, step: int, phase: Phase) -> None:
        """Announce a phase."""
        self._phase = phase
        self.listener.phase_began(step, phase)

    # --- the state that a phase needs ---

    def _make_ready(self, step: int, policy_at: int | None, engines_at: int | None) -> None:
        """Start roles that are not up, and bring the weights to the given steps. Does nothing if all is in place."""
        needs_sync = engines_at is not None and self.roles.engines_at != engines_at
        if needs_sync and (self.roles.policy_at or 0) > (engines_at or 0):
            self.roles.end("policy")  # it has learned since: its state at that step is loaded again
            self.checkpointing.abandon()
        self._bring_up(step)
        wanted = policy_at if policy_at is not None or not needs_sync else engines_at
        if wanted is not None and self.roles.policy_at != wanted:
            self._restore_policy(step, wanted)
        if engines_at is not None and self.roles.engines_at != engines_at:
            self.display.phase("sending the weights to the engine")
            self.begin(step, "sync")
            with self._part("sync"), self.deadlines.limited("sync"):
                self.roles.sync(engines_at)
            self.deadlines.done("sync")

    def _bring_up(self, step: int) -> None:
        if self.roles.up:
            return
        self._phase = None
        self.display.phase("loading the policy and the engine")
        self.deadlines.forget()
        with self.deadlines.limited(None):
            self.roles.construct()
            self.faults.inject(step, None)
            self.roles.load()

    def _restore_policy(self, step: int, policy_at: int) -> None:
        """Load the newest checkpoint, and replay the updates after it from the journal.

        A policy that failed during a replay resumes after its last update.
        """
        begun_at = self.roles.policy_at
        if not begun_at:
            with self._part("checkpoint"), self.deadlines.limited("checkpoint"):
                begun_at = self._checkpoint_step = self.checkpointing.restore(self.ledger.last_step)
            if self.roles.policy_at is None:
                self.roles.end("policy")  # it has a part of a damaged checkpoint
                self._bring_up(step)
        replayed = 0
        try:
            for replay in range(begun_at + 1, policy_at + 1):
                self.display.phase(f"replaying step {replay} of {policy_at} from the journal")
                self.begin(step, "update")
                with self._part("replay"), self.deadlines.limited("update"):
                    updates = self.roles.update(batch := self.journal.load(replay))
                if replay <= self.ledger.last_step:
                    require_same_updates(self.ledger.steps[replay - 1], updates)
                self.on_replay(batch)
                self.deadlines.done("update")
                replayed += 1
        finally:
            self.ledger.record(
                RestoreRecord(attempt=self.attempt, checkpoint_step=self._checkpoint_step, replayed_steps=replayed)
            )

    def _record_ready(self) -> None:
        self.recovery.renewed = False
        self.ledger.record(ReadyRecord(attempt=self.attempt, seconds=self.roles.clock.take()))

    def _part(self, name: str) -> AbstractContextManager[None]:
        return self.roles.clock.part(name)
