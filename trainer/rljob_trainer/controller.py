"""The one process that drives a job: generate → score → update → sync, and commit, step after step.

A step is a transaction. Its scored rollouts go to the journal before anything is learnt from them, and its line in the
ledger is its commit. A checkpoint holds the state after some step; the journal holds the rollouts of every step since.
So whatever moment the job is stopped at, the next run loads the checkpoint, replays the updates of the committed steps
after it from the journal (nothing is generated or scored again), and goes on at the first step that is not committed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial

import numpy as np

from rljob_trainer.algorithm.advantage import group_advantages
from rljob_trainer.checkpointing import Checkpointing
from rljob_trainer.display.run_display import RunDisplay
from rljob_trainer.ledger.journal import RolloutJournal
from rljob_trainer.ledger.ledger import Ledger
from rljob_trainer.phase_clock import PhaseClock
from rljob_trainer.roles.colocated import ColocatedRoles
from rljob_trainer.rollouts import Completion, Prompt, RolloutBatch
from rljob_trainer.run_listener import RunListener
from rljob_trainer.step_record import memory_by_phase, step_record
from rljob_trainer.stop_request import StopRequest
from rljob_trainer.tasks.task import Task
from rljob_trainer.telemetry.memory import MemorySample


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """What the loop itself needs to know of the manifest."""

    steps: int
    prompts_per_step: int
    group_size: int
    scale_advantages: bool
    seed: int


@dataclass(slots=True)
class Controller:
    """Runs one attempt of a job. It holds no weights and no GPU: the roles do."""

    settings: LoopSettings
    task: Task
    roles: ColocatedRoles
    ledger: Ledger
    journal: RolloutJournal
    checkpointing: Checkpointing
    display: RunDisplay
    listener: RunListener
    stop: StopRequest
    attempt: int

    def run(self) -> None:
        """Go on where the job stopped, until every step is committed or a stop is asked for."""
        self.restore()
        for step in self.ledger.remaining(self.settings.steps):
            if self.stop:
                break
            self.run_step(step)
        self.checkpointing.close(self.ledger.last_step)

    def restore(self) -> None:
        """Bring the policy to the state after the last committed step, and the engines to its weights."""
        restored = self.checkpointing.restore(self.ledger.last_step)
        replay = range(restored + 1, self.ledger.last_step + 1)
        for step in replay:
            self.display.phase(f"replaying step {step} of {replay.stop - 1} from the journal")
            self.listener.phase_began(step, "update")
            self.roles.update(self.journal.load(step))
        self.ledger.record_restore(restored)
        self.display.phase("sending the weights to the engine")
        self.listener.phase_began(self.ledger.next_step, "sync")
        self.roles.sync(version=self.ledger.last_step)

    def run_step(self, step: int) -> None:
        clock = PhaseClock(partial(self.listener.phase_began, step))
        with clock.phase("checkpoint"):
            self.checkpointing.advance(committed=step - 1)
        batch, engine_memory = self.rollouts(step, clock)
        with clock.phase("update"):
            updates = self.roles.update(batch)
        with clock.phase("sync"):
            self.roles.sync(version=step)
        memory = memory_by_phase(updates, engine_memory)
        record = step_record(self.attempt, batch, updates, memory, clock)
        self.ledger.commit(record)
        self.display.step(record)
        self.listener.step_committed(record, memory)

    # --- the rollouts of a step ---

    def rollouts(self, step: int, clock: PhaseClock) -> tuple[RolloutBatch, dict[str, MemorySample]]:
        """The step's scored rollouts: those that an interrupted attempt journalled, else new ones."""
        if self.journal.has(step):
            return self.journal.load(step), {}
        prompts = self.task.prompts(step, self.settings.prompts_per_step)
        seeds = [sampling_seed(self.settings.seed, step, position) for position in range(len(prompts))]
        with clock.phase("rollout"):
            completions, memory = self.roles.generate(step, prompts, self.settings.group_size, seeds)
        with clock.phase("reward"):
            batch = self.score(step, prompts, completions)
            self.journal.save(batch)
        return batch, memory

    def score(self, step: int, prompts: list[Prompt], completions: list[Completion]) -> RolloutBatch:
        group_size = self.settings.group_size
        scores = [self.task.score(prompts[i // group_size], completion) for i, completion in enumerate(completions)]
        rewards = np.asarray(scores, np.float32)
        advantages = group_advantages(rewards, group_size, scale=self.settings.scale_advantages)
        return RolloutBatch.of(step, group_size, prompts, completions).scored(rewards, advantages)


def sampling_seed(seed: int, step: int, position: int) -> int:
    """The engine's seed for the prompt at `position` of `step`: a function of the three alone, so a step repeats."""
    digest = hashlib.sha256(f"{seed}/{step}/{position}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
