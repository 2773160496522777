"""The training loop: generate → score → update → sync → commit, step after step.

A step is a transaction. Its scored rollouts are written to the journal before the policy learns from them, and its
record in the ledger is its commit. A checkpoint holds the state after a step; the journal holds the rollouts of every
later step. A job can therefore stop at any moment: the next run loads the checkpoint, replays the updates of the
committed steps after it from the journal, without generating or scoring again, and resumes at the first uncommitted
step.

Recovery within an attempt works the same way (`phases`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from rljob_api.job import RLJobSpec
from rljob_client.errors import RunError
from rljob_client.run_directory.ledger import Ledger
from rljob_memory.sample import MemorySample
from rljob_trainer.display.run_display import RunDisplay
from rljob_trainer.ledger.journal import RolloutJournal
from rljob_trainer.phase_clock import PartClock
from rljob_trainer.policy.config import UpdateResult
from rljob_trainer.recovery.early_warning import EarlyWarning
from rljob_trainer.roles.calls import Calls, serving
from rljob_trainer.roles.checkpointing import Checkpointing
from rljob_trainer.roles.roles import Roles
from rljob_trainer.rollout_batch import RolloutBatch
from rljob_trainer.run_listener import RunListener
from rljob_trainer.runtime.between_steps import BetweenSteps
from rljob_trainer.runtime.dynamic_sampling import groups_with_signal, sample
from rljob_trainer.runtime.phases import Phases
from rljob_trainer.runtime.step_health import findings, require_agreement, require_learning
from rljob_trainer.runtime.step_record import memory_by_phase, step_record
from rljob_trainer.runtime.step_rollouts import BegunRollouts, GeneratedRollouts, StepRollouts
from rljob_trainer.runtime.step_scoring import StepScoring
from rljob_trainer.runtime.stop_request import StopRequest
from rljob_trainer.runtime.streamed_update import StreamedUpdate, obstacle_to_streaming


@dataclass(slots=True)
class Controller:
    """Runs the steps of one attempt. It holds neither weights nor a GPU: the roles do."""

    spec: RLJobSpec
    step_rollouts: StepRollouts
    scoring: StepScoring
    phases: Phases
    roles: Roles
    ledger: Ledger
    journal: RolloutJournal
    checkpointing: Checkpointing
    early_warning: EarlyWarning
    between_steps: BetweenSteps
    export: Callable[[], None]
    """Writes the trained model, once all steps are committed."""
    display: RunDisplay
    listener: RunListener
    stop: StopRequest
    attempt: int
    stream_updates: str | None = None
    """Value of the environment variable `RLJOB_STREAM_UPDATES`."""
    _ahead: BegunRollouts | None = field(default=None, init=False)
    _streamed: StreamedUpdate | None = field(default=None, init=False)
    """The update of the step whose rollouts have just been generated."""

    def run(self) -> None:
        """Resume at the first uncommitted step; run until every step is committed or a stop is requested."""
        self.phases.start()
        self.stop.after_step()
        for step in self.ledger.remaining(self.spec.algorithm.steps):
            if not self.stop:
                self.between_steps.work(self, step - 1)
            if self.stop:
                break
            self.run_step(step)
        self._finish()

    def run_step(self, step: int) -> None:
        clock = PartClock()
        before = step - 1
        self.phases.do(step, "checkpoint", clock, partial(self.checkpointing.advance, before), policy_at=before)
        batch, engine_memory = self.rollouts(step, step, before, clock)
        overlaps = self.spec.algorithm.max_staleness > 0 and step < self.spec.algorithm.steps
        if overlaps:
            self._begin_ahead(step + 1, before)
        with serving(self._ahead.generation if self._ahead else None):
            has_begun = self._streamed is not None and bool(self._streamed.added)
            updates = self.phases.do(
                step, "update", clock, partial(self._update, batch), policy_at=before, of_step=not has_begun
            )
        if step == 1:
            require_agreement(updates)
        if overlaps:
            # Before this step is committed: a later attempt has no engine with the weights that generate them.
            _, memory_ahead = self.rollouts(step, step + 1, before, clock)
            engine_memory = engine_memory | memory_ahead
        self.phases.do(step, "sync", clock, partial(self.roles.sync, step), policy_at=step)
        memory = memory_by_phase(updates, engine_memory)
        asleep = self.roles.engines_sleep
        record = step_record(self.attempt, batch, updates, memory, clock, engines_sleep=asleep)
        self.ledger.commit(record)
        self.display.step(record)
        self.listener.step_committed(record, memory)
        self._look_at_health()
        self.phases.until_done(step, partial(self.early_warning.look, step, memory, engines_sleep=asleep))

    def _update(self, batch: RolloutBatch) -> dict[str, UpdateResult]:
        """Update the policy. The parts of a streamed update that were added are repeated after a failure."""
        streamed, self._streamed = self._streamed, None
        if streamed is None:
            return self.roles.update(batch)
        return self.roles.update(batch, len(streamed.added), streamed.adding)

    def _look_at_health(self) -> None:
        """Warn of problems of the last committed step. Raises `BadInput` if they repeat too often."""
        found = findings(self.ledger.steps, responses_may_end=not self.spec.algorithm.ignore_end_of_sequence)
        for finding in found:
            if finding.is_due:
                self.display.warning(finding.message)
        self.listener.training_warning(found[0].warning() if found else None)
        self._require_learning()

    def _require_learning(self) -> None:
        require_learning(self.ledger.steps, self.spec.recovery.max_steps_without_learning, self.spec.algorithm.steps)

    def _finish(self) -> None:
        """Save a checkpoint of the last state; write the model if the job is complete."""
        last = self.ledger.last_step
        self.phases.save(last)
        if last >= self.spec.algorithm.steps:
            self._require_learning()  # also in an attempt that commits no step
            if not self.between_steps.work(self, last):
                return  # the next attempt evaluates the model, and then writes it
            self.display.phase("writing the model")
            self.phases.do(last, "checkpoint", PartClock(), self.export, policy_at=last)

    # --- the rollouts of a step ---

    def rollouts(
        self, step: int, rollout_step: int, weights_at: int, clock: PartClock
    ) -> tuple[RolloutBatch, dict[str, MemorySample]]:
        """The scored rollouts of `rollout_step`, in step `step`: from the journal if it has them, otherwise new ones.

        `weights_at`: the step whose weights generate them.
        """
        if (journaled := self.journal.find(rollout_step)) is not None:
            self.step_rollouts.observe(journaled)
            return journaled, {}

        def generate(first: int, count: int) -> GeneratedRollouts:
            begun, self._ahead = self._ahead, None  # after a failure, all of them are generated again
            if obstacle_to_streaming(self.spec, self.roles, self.stream_updates) is None:
                return self._generate_and_learn(step, range(first, first + count))
            if begun is None or begun.step != rollout_step or begun.engines_ended != self.roles.engines_ended:
                begun = self._begin(rollout_step, range(first, first + count))
            return begun.finish()

        def generated_round(first: int, count: int) -> GeneratedRollouts:
            # While it learns from one step, the policy has other weights than the engines need for the next.
            policy_at = weights_at if rollout_step == step else None
            work = partial(generate, first, count)
            return self.phases.do(step, "rollout", clock, work, policy_at=policy_at, engines_at=weights_at)

        def signals(generated: GeneratedRollouts) -> list[bool]:
            self.phases.begin(step, "reward")
            with clock.part("reward"):
                return groups_with_signal(self.scoring.rewarded(rollout_step, generated)[0])

        algorithm = self.spec.algorithm
        first, wanted = self._first_position(rollout_step), algorithm.prompts_per_step
        if (dynamic := algorithm.dynamic_sampling) is None:
            generated = generated_round(first, wanted)
        else:
            generated = sample(first, wanted, dynamic.max_rounds, generated_round, signals)
        self.phases.begin(step, "reward")
        with clock.part("reward"):
            batch = self.scoring.score(rollout_step, generated)
            batch = replace(batch, weights_version=weights_at, left=generated.left)
            if self._streamed is not None:
                batch = self._streamed.recorded_in(batch)
            self.journal.save(batch)
        self.step_rollouts.observe(batch)
        return batch, generated.memory

    def _generate_and_learn(self, step: int, positions: Sequence[int]) -> GeneratedRollouts:
        """Generate the rollouts of `step` while the policy learns from those that are complete."""

        def add_part(batch: RolloutBatch, added: int) -> Calls:
            if not added:
                self.phases.faults.inject(step, "update")
            with self.phases.deadlines.limited("update", writing=self.checkpointing.writing):
                return self.roles.add_part(batch, added)

        streamed = StreamedUpdate(len(positions), lambda generated: self.scoring.scored(step, generated)[0], add_part)
        try:
            with serving(streamed):
                generated = self.step_rollouts.begin(step, positions, streamed.take).finish()
        except RunError:
            if streamed.added:
                self.roles.drop_parts(streamed.adding)
            raise
        self._streamed = streamed
        return generated

    def _first_position(self, rollout_step: int) -> int:
        """Position of the first prompt of `rollout_step` in the sequence of all prompts."""
        before = rollout_step - 1
        if self.spec.algorithm.dynamic_sampling is None or not before:
            return before * self.spec.algorithm.prompts_per_step
        if before <= self.ledger.last_step:
            return self.ledger.steps[before - 1].prompts_drawn
        return self.journal.load(before).prompts_drawn

    def _begin_ahead(self, rollout_step: int, weights_at: int) -> None:
        """Begin to generate the rollouts of `rollout_step`, if the engines can and the journal has none."""
        if self.roles.engines_at != weights_at or self.journal.find(rollout_step) is not None:
            return
        self.phases.faults.inject(rollout_step, "rollout")
        with self.phases.deadlines.limited("rollout"):
            first = self._first_position(rollout_step)
            self._ahead = self._begin(rollout_step, range(first, first + self.spec.algorithm.prompts_per_step))

    def _begin(self, rollout_step: int, positions: Sequence[int]) -> BegunRollouts:
        """Begin to generate the rollouts of `rollout_step`, or a round of them. `positions`: those of its prompts,
        unless partial rollouts decide them."""
        if not self.spec.algorithm.partial_rollout_prompts:
            return self.step_rollouts.begin(rollout_step, positions)
        # The journal has the step before, unless `rollout_step` is the first step, or the first beyond a completed job.
        before = self.journal.find(rollout_step - 1)
        return self.step_rollouts.begin_partial(rollout_step, () if before is None else before.left)
