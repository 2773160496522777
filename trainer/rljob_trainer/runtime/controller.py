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

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np

from rljob_api.job import RLJobSpec
from rljob_api.plan_change import Phase
from rljob_client.errors import RunError
from rljob_client.run_directory.ledger import Ledger
from rljob_client.run_directory.records import ReadyRecord, RestoreRecord
from rljob_memory.sample import MemorySample
from rljob_trainer.algorithms.advantages import AdvantageFunction, scored
from rljob_trainer.display.run_display import RunDisplay
from rljob_trainer.ledger.journal import RolloutJournal
from rljob_trainer.phase_clock import PartClock
from rljob_trainer.policy.config import UpdateResult
from rljob_trainer.recovery.early_warning import EarlyWarning
from rljob_trainer.recovery.fault_schedule import FaultSchedule
from rljob_trainer.recovery.phase_deadlines import PhaseDeadlines
from rljob_trainer.recovery.recovery import Recovery
from rljob_trainer.rewards.overlong import overlong_penalty
from rljob_trainer.roles.calls import Calls, serving
from rljob_trainer.roles.checkpointing import Checkpointing
from rljob_trainer.roles.roles import Roles
from rljob_trainer.rollout_batch import RolloutBatch
from rljob_trainer.run_listener import RunListener
from rljob_trainer.runtime.between_steps import BetweenSteps
from rljob_trainer.runtime.dynamic_sampling import groups_with_signal, sample
from rljob_trainer.runtime.step_health import (
    findings,
    is_power_of_two,
    require_agreement,
    require_learning,
    require_same_updates,
)
from rljob_trainer.runtime.step_record import memory_by_phase, step_record
from rljob_trainer.runtime.step_rollouts import BegunRollouts, GeneratedRollouts, ResponseLengths, StepRollouts
from rljob_trainer.runtime.stop_request import StopRequest
from rljob_trainer.runtime.streamed_update import StreamedUpdate, obstacle_to_streaming
from rljob_trainer.tasks.scoring import Scorer
from rljob_trainer.tasks.step_rewards import StepRewards, step_rewards
from rljob_trainer.tasks.task import Task

Result = TypeVar("Result")


@dataclass(slots=True)
class Controller:
    """Runs the steps of one attempt. It holds neither weights nor a GPU: the roles do."""

    spec: RLJobSpec
    task: Task
    scorer: Scorer
    advantage: AdvantageFunction
    roles: Roles
    ledger: Ledger
    journal: RolloutJournal
    checkpointing: Checkpointing
    recovery: Recovery
    faults: FaultSchedule
    deadlines: PhaseDeadlines
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
    _phase: Phase | None = field(default=None, init=False)
    _checkpoint_step: int = field(default=0, init=False)
    _ahead: BegunRollouts | None = field(default=None, init=False)
    _streamed: StreamedUpdate | None = field(default=None, init=False)
    """The update of the step whose rollouts have just been generated."""
    _lengths: ResponseLengths = field(default_factory=ResponseLengths, init=False)

    def __post_init__(self) -> None:
        self.recovery.save = self.save

    def run(self) -> None:
        """Resume at the first uncommitted step; run until every step is committed or a stop is requested."""
        self._start()
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
        self.do(step, "checkpoint", clock, partial(self.checkpointing.advance, before), policy_at=before)
        batch, engine_memory = self.rollouts(step, step, before, clock)
        overlaps = self.spec.algorithm.max_staleness > 0 and step < self.spec.algorithm.steps
        if overlaps:
            self._begin_ahead(step + 1, before)
        with serving(self._ahead.generation if self._ahead else None):
            has_begun = self._streamed is not None and bool(self._streamed.added)
            updates = self.do(
                step, "update", clock, partial(self._update, batch), policy_at=before, of_step=not has_begun
            )
        if step == 1:
            require_agreement(updates)
        if overlaps:
            # Before this step is committed: a later attempt has no engine with the weights that generate them.
            _, memory_ahead = self.rollouts(step, step + 1, before, clock)
            engine_memory = engine_memory | memory_ahead
        self.do(step, "sync", clock, partial(self.roles.sync, step), policy_at=step)
        memory = memory_by_phase(updates, engine_memory)
        asleep = self.roles.engines_sleep
        record = step_record(self.attempt, batch, updates, memory, clock, engines_sleep=asleep)
        self.ledger.commit(record)
        self.display.step(record)
        self.listener.step_committed(record, memory)
        self._look_at_health()
        self._until_done(step, partial(self.early_warning.look, step, memory, engines_sleep=asleep))

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

    # --- start and finish ---

    def _start(self) -> None:
        """Bring the policy to the state after the last committed step, and its weights to the engines."""
        last = self.ledger.last_step
        self._until_done(self.ledger.next_step, partial(self._make_ready, self.ledger.next_step, last, last))
        self._record_ready()

    def _record_ready(self) -> None:
        self.recovery.renewed = False
        self.ledger.record(ReadyRecord(attempt=self.attempt, seconds=self.roles.clock.take()))

    def _finish(self) -> None:
        """Save a checkpoint of the last state; write the model if the job is complete."""
        last = self.ledger.last_step
        self.save(last)
        if last >= self.spec.algorithm.steps:
            self._require_learning()  # also in an attempt that commits no step
            if not self.between_steps.work(self, last):
                return  # the next attempt evaluates the model, and then writes it
            self.display.phase("writing the model")
            self.do(last, "checkpoint", PartClock(), self.export, policy_at=last)

    def save(self, last: int) -> None:
        """Write a checkpoint of the state after the committed step `last`, and wait for it."""
        self.do(max(last, 1), "checkpoint", PartClock(), partial(self.checkpointing.close, last), policy_at=last)

    # --- the rollouts of a step ---

    def rollouts(
        self, step: int, rollout_step: int, weights_at: int, clock: PartClock
    ) -> tuple[RolloutBatch, dict[str, MemorySample]]:
        """The scored rollouts of `rollout_step`, in step `step`: from the journal if it has them, otherwise new ones.

        `weights_at`: the step whose weights generate them.
        """
        if (journaled := self.journal.find(rollout_step)) is not None:
            self._observe_lengths(journaled)
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
            return self.do(step, "rollout", clock, work, policy_at=policy_at, engines_at=weights_at)

        def signals(generated: GeneratedRollouts) -> list[bool]:
            self._phase_began(step, "reward")
            with clock.part("reward"):
                return groups_with_signal(self._rewarded(rollout_step, generated)[0])

        algorithm = self.spec.algorithm
        first, wanted = self._first_position(rollout_step), algorithm.prompts_per_step
        if (dynamic := algorithm.dynamic_sampling) is None:
            generated = generated_round(first, wanted)
        else:
            generated = sample(first, wanted, dynamic.max_rounds, generated_round, signals)
        if (missing := generated.metrics.get("missing_groups")) and self._is_due("missing_groups"):
            self.display.warning(
                f"step {rollout_step}: {missing:.0f} of {wanted} groups have equal rewards, also after "
                f"{generated.metrics['sampling_rounds']:.0f} rounds of dynamic sampling"
            )
        self._phase_began(step, "reward")
        with clock.part("reward"):
            batch = replace(self.score(rollout_step, generated), weights_version=weights_at, left=generated.left)
            if self._streamed is not None:
                batch = self._streamed.recorded_in(batch)
            self.journal.save(batch)
        self._observe_lengths(batch)
        return batch, generated.memory

    def _generate_and_learn(self, step: int, positions: Sequence[int]) -> GeneratedRollouts:
        """Generate the rollouts of `step` while the policy learns from those that are complete."""

        def add_part(batch: RolloutBatch, added: int) -> Calls:
            if not added:
                self.faults.inject(step, "update")
            with self.deadlines.limited("update", writing=self.checkpointing.writing):
                return self.roles.add_part(batch, added)

        streamed = StreamedUpdate(len(positions), lambda generated: self._scored(step, generated)[0], add_part)
        rollouts = StepRollouts(self.spec.algorithm, self.task, self.scorer, self.roles, self._lengths)
        try:
            with serving(streamed):
                generated = rollouts.begin(step, positions, streamed.take).finish()
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
        self.faults.inject(rollout_step, "rollout")
        with self.deadlines.limited("rollout"):
            first = self._first_position(rollout_step)
            self._ahead = self._begin(rollout_step, range(first, first + self.spec.algorithm.prompts_per_step))

    def _begin(self, rollout_step: int, positions: Sequence[int]) -> BegunRollouts:
        """Begin to generate the rollouts of `rollout_step`, or a round of them. `positions`: those of its prompts,
        unless partial rollouts decide them."""
        rollouts = StepRollouts(self.spec.algorithm, self.task, self.scorer, self.roles, self._lengths)
        if not self.spec.algorithm.partial_rollout_prompts:
            return rollouts.begin(rollout_step, positions)
        # The journal has the step before, unless `rollout_step` is the first step, or the first beyond a completed job.
        before = self.journal.find(rollout_step - 1)
        return rollouts.begin_partial(rollout_step, () if before is None else before.left)

    def _observe_lengths(self, batch: RolloutBatch) -> None:
        """Remember the lengths of the responses, for the order in which engines take prompts."""
        if self.spec.algorithm.partial_rollout_prompts or self.spec.algorithm.dynamic_sampling:
            return  # the prompts of a step are those that its engines completed first, or those with different rewards
        items = self.task.items_of_step(batch.step, self.spec.algorithm.prompts_per_step)
        self._lengths.observe(items, [len(response) for response in batch.response_ids], self.spec.algorithm.group_size)

    def score(self, step: int, generated: GeneratedRollouts) -> RolloutBatch:
        """The completions with their rewards and advantages, which it reports."""
        batch, found = self._scored(step, generated)
        if found.failures and self._is_due("reward_errors"):
            self.display.warning(
                f"step {step}: {found.failures} of {len(batch)} rewards are 0, since {found.first_failure}"
            )
        self.listener.step_scored(batch, generated.prompts, generated.completions)
        return batch

    def _scored(self, step: int, generated: GeneratedRollouts) -> tuple[RolloutBatch, StepRewards]:
        """The completions with the rewards of the task, which it waits for, and with advantages."""
        algorithm, completions = self.spec.algorithm, generated.completions
        batch, found = self._rewarded(step, generated)
        rewards, metrics = batch.rewards, dict(generated.metrics)
        if (penalty := algorithm.overlong_penalty) is not None:
            lengths = [len(completion.token_ids) for completion in completions]
            penalties = overlong_penalty(lengths, algorithm.max_response_tokens, penalty.buffer_tokens, penalty.factor)
            rewards, metrics["overlong_penalty"] = rewards + penalties, float(penalties.mean())
        batch = scored(batch, rewards, self.advantage, algorithm.settings, found.failures)
        return replace(batch, prompts_drawn=generated.prompts_drawn, metrics=metrics), found

    def _rewarded(self, step: int, generated: GeneratedRollouts) -> tuple[RolloutBatch, StepRewards]:
        """The completions with the rewards of the task, which it waits for, and without advantages."""
        algorithm, on_error = self.spec.algorithm, self.spec.task.on_reward_error
        prompts, completions = generated.prompts, generated.completions
        results = generated.rewards.results(stop_at_failure=on_error == "Fail")
        found = step_rewards(self.task, prompts, completions, results, on_error)
        batch = replace(
            RolloutBatch.of(step, algorithm.group_size, prompts, completions),
            reward_parts={name: np.asarray(part, np.float32) for name, part in found.parts.items()},
            kept=np.asarray(found.kept, np.bool_),
        )
        if algorithm.mask_truncated:
            batch = replace(batch, kept=batch.takes_part & batch.finished)
        return replace(batch, rewards=np.asarray(found.rewards, np.float32)), found

    def _is_due(self, metric: str) -> bool:
        """True for the first step with this metric, the second, the fourth, and so on: a warning in each would hide the
        others."""
        return is_power_of_two(sum(record.metrics.get(metric, 0) > 0 for record in self.ledger.steps) + 1)

    # --- phases, which are retried after a failure ---

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
            self._phase_began(step, phase)
            limit = self.deadlines.limited(phase, writing=self.checkpointing.writing, times=times_usual)
            with clock.part(phase), limit:
                if of_step:
                    self.faults.inject(step, phase)
                result = work()
            self.deadlines.done(phase)
            return result

        return self._until_done(step, attempted)

    def _until_done(self, step: int, work: Callable[[], Result]) -> Result:
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
            self._phase_began(step, "sync")
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
                self._phase_began(step, "update")
                with self._part("replay"), self.deadlines.limited("update"):
                    updates = self.roles.update(batch := self.journal.load(replay))
                if replay <= self.ledger.last_step:
                    require_same_updates(self.ledger.steps[replay - 1], updates)
                self._observe_lengths(batch)
                self.deadlines.done("update")
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
