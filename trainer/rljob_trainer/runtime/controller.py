"""The training loop: generate → score → update → sync → commit, step after step.

A step is a transaction. Its scored rollouts are written to the journal before the policy learns from them, and its
record in the ledger is its commit. A checkpoint holds the state after a step; the journal holds the rollouts of every
later step. A job can therefore stop at any moment: the next run loads the checkpoint, replays the updates of the
committed steps after it from the journal, without generating or scoring again, and resumes at the first uncommitted
step.

Recovery within an attempt works the same way: each phase declares the step whose weights it needs in the policy and in
the engines. Roles that a failure has ended are brought to that state before the phase is retried.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np

from rljob_api.plan_change import Phase
from rljob_memory.sample import MemorySample
from rljob_trainer.algorithm.advantage import group_advantages
from rljob_trainer.display.run_display import RunDisplay
from rljob_trainer.errors import TrainerError
from rljob_trainer.ledger.journal import RolloutJournal
from rljob_trainer.ledger.ledger import Ledger
from rljob_trainer.ledger.records import ReadyRecord, RestoreRecord
from rljob_trainer.phase_clock import PhaseClock
from rljob_trainer.recovery.early_warning import EarlyWarning
from rljob_trainer.recovery.fault_schedule import FaultSchedule
from rljob_trainer.recovery.recovery import Recovery
from rljob_trainer.roles.checkpointing import Checkpointing
from rljob_trainer.roles.colocated import ColocatedRoles
from rljob_trainer.rollout_batch import Completion, Prompt, RolloutBatch
from rljob_trainer.run_listener import RunListener
from rljob_trainer.runtime.step_record import memory_by_phase, step_record
from rljob_trainer.runtime.stop_request import StopRequest
from rljob_trainer.tasks.task import Task

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """Settings of the loop, from the manifest."""

    steps: int
    prompts_per_step: int
    group_size: int
    scale_advantages: bool
    seed: int


@dataclass(slots=True)
class Controller:
    """Runs the steps of one attempt. It holds neither weights nor a GPU: the roles do."""

    settings: LoopSettings
    task: Task
    roles: ColocatedRoles
    ledger: Ledger
    journal: RolloutJournal
    checkpointing: Checkpointing
    recovery: Recovery
    faults: FaultSchedule
    early_warning: EarlyWarning
    export: Callable[[], None]
    """Writes the trained model, once all steps are committed."""
    display: RunDisplay
    listener: RunListener
    stop: StopRequest
    attempt: int
    _phase: Phase | None = field(default=None, init=False)
    _checkpoint_step: int = field(default=0, init=False)

    def run(self) -> None:
        """Resume at the first uncommitted step; run until every step is committed or a stop is requested."""
        self._start()
        self.stop.after_step()
        for step in self.ledger.remaining(self.settings.steps):
            if self.stop:
                break
            self.run_step(step)
        self._finish()

    def run_step(self, step: int) -> None:
        clock = PhaseClock(partial(self._phase_began, step))
        before = step - 1
        self._do(step, "checkpoint", clock, partial(self.checkpointing.advance, before), policy_at=before)
        batch, engine_memory = self.rollouts(step, clock)
        updates = self._do(step, "update", clock, partial(self.roles.update, batch), policy_at=before)
        self._do(step, "sync", clock, partial(self.roles.sync, step), policy_at=step)
        memory = memory_by_phase(updates, engine_memory)
        record = step_record(self.attempt, batch, updates, memory, clock)
        self.ledger.commit(record)
        self.display.step(record)
        self.listener.step_committed(record, memory)
        self._until_done(step, partial(self.early_warning.look, step, memory))

    # --- start and finish ---

    def _start(self) -> None:
        """Bring the policy to the state after the last committed step, and its weights to the engines."""
        last = self.ledger.last_step
        self._until_done(self.ledger.next_step, partial(self._make_ready, self.ledger.next_step, last, last))
        self.ledger.record(ReadyRecord(attempt=self.attempt, seconds=self.roles.clock.take()))

    def _finish(self) -> None:
        """Save a checkpoint of the last state; write the model if the job is complete."""
        last = self.ledger.last_step
        clock = PhaseClock(partial(self._phase_began, max(last, 1)))
        self._do(max(last, 1), "checkpoint", clock, partial(self.checkpointing.close, last), policy_at=last)
        if last >= self.settings.steps:
            self.display.phase("writing the model")
            self._do(last, "checkpoint", clock, self.export, policy_at=last)

    # --- the rollouts of a step ---

    def rollouts(self, step: int, clock: PhaseClock) -> tuple[RolloutBatch, dict[str, MemorySample]]:
        """The step's scored rollouts: from the journal if an interrupted attempt wrote them, otherwise new ones."""
        if self.journal.has(step):
            return self.journal.load(step), {}
        prompts = self.task.prompts(step, self.settings.prompts_per_step)
        seeds = [sampling_seed(self.settings.seed, step, position) for position in range(len(prompts))]
        generate = partial(self.roles.generate, step, prompts, self.settings.group_size, seeds)
        completions, memory = self._do(step, "rollout", clock, generate, policy_at=step - 1, engines_at=step - 1)
        with clock.phase("reward"):
            batch = self.score(step, prompts, completions)
            self.journal.save(batch)
        return batch, memory

    def score(self, step: int, prompts: list[Prompt], completions: list[Completion]) -> RolloutBatch:
        """The completions with their rewards and advantages."""
        group_size = self.settings.group_size
        scores = [self.task.score(prompts[i // group_size], completion) for i, completion in enumerate(completions)]
        rewards = np.asarray(scores, np.float32)
        advantages = group_advantages(rewards, group_size, scale=self.settings.scale_advantages)
        return RolloutBatch.of(step, group_size, prompts, completions).scored(rewards, advantages)

    # --- phases, which are retried after a failure ---

    def _do(
        self,
        step: int,
        phase: Phase,
        clock: PhaseClock,
        work: Callable[[], Result],
        *,
        policy_at: int,
        engines_at: int | None = None,
    ) -> Result:
        """Run a phase of `step`; recover and retry if it fails.

        `policy_at`: the step after which the phase needs the policy. `engines_at`: the step whose weights it needs in
        the engines; None: any.
        """

        def attempted() -> Result:
            self._make_ready(step, policy_at, engines_at)
            with clock.phase(phase):
                self.faults.inject(step, phase)
                return work()

        return self._until_done(step, attempted)

    def _until_done(self, step: int, work: Callable[[], Result]) -> Result:
        while True:
            try:
                result = work()
            except TrainerError as failure:
                self.recovery.recover(failure, step, self._phase)
                self.early_warning.forget()
            else:
                self.recovery.phase_done(step, self._phase)
                return result

    def _make_ready(self, step: int, policy_at: int, engines_at: int | None) -> None:
        """Start roles that are not up, and bring the weights to the given steps. Does nothing if all is in place."""
        if not self.roles.up:
            self._phase = None
            self.display.phase("loading the policy and the engine")
            self.roles.construct()
            self.faults.inject(step, None)
            self.roles.load()
        if self.roles.policy_at != policy_at:
            self._restore_policy(step, policy_at)
        if engines_at is not None and self.roles.engines_at != engines_at:
            self.display.phase("sending the weights to the engine")
            self._phase_began(step, "sync")
            with self._part("sync"):
                self.roles.sync(engines_at)

    def _restore_policy(self, step: int, policy_at: int) -> None:
        """Load the newest checkpoint, and replay the updates after it from the journal.

        A policy that failed during a replay resumes after its last update.
        """
        begun_at = self.roles.policy_at
        if not begun_at:
            with self._part("checkpoint"):
                begun_at = self._checkpoint_step = self.checkpointing.restore(self.ledger.last_step)
        replayed = 0
        try:
            for replay in range(begun_at + 1, policy_at + 1):
                self.display.phase(f"replaying step {replay} of {policy_at} from the journal")
                self._phase_began(step, "update")
                with self._part("replay"):
                    self.roles.update(self.journal.load(replay))
                replayed += 1
        finally:
            self.ledger.record(
                RestoreRecord(attempt=self.attempt, checkpoint_step=self._checkpoint_step, replayed_steps=replayed)
            )

    def _phase_began(self, step: int, phase: Phase) -> None:
        self._phase = phase
        self.listener.phase_began(step, phase)

    def _part(self, name: str) -> AbstractContextManager[None]:
        return self.roles.clock.part(name)


def sampling_seed(seed: int, step: int, position: int) -> int:
    """The engine's seed for the prompt at `position` of `step`. Deterministic, so that a step can be repeated."""
    digest = hashlib.sha256(f"{seed}/{step}/{position}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
