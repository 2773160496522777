"""The rollouts of a step while they are generated: all groups of its prompts, or a quota of the groups that engines
hold.

With partial rollouts, the prompts of the job are one sequence: those of step 1, then those of step 2, and so on. For
each step but the last, the engines hold `prompts_per_step + partial_rollout_prompts` groups: those left by the previous
step, and new ones, whose prompts follow in the sequence. The step completes `prompts_per_step` of them
(`rollout.lots`). The last step leaves none, so that a job learns from the same prompts with and without partial
rollouts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from rljob_api.algorithm import AlgorithmSpec
from rljob_memory.sample import MemorySample
from rljob_trainer.roles.calls import Served
from rljob_trainer.roles.generation import WorkQueue
from rljob_trainer.roles.roles import Roles
from rljob_trainer.rollout.lots import HeldGroup, LotResult, Lots, WholeGroups, deal, in_order, unstarted
from rljob_trainer.rollout_batch import Completion, PartialGroup, Prompt, RolloutBatch
from rljob_trainer.tasks.scoring import ChosenRewards, KnownRewards, PendingRewards, Scorer
from rljob_trainer.tasks.task import Task


@dataclass(frozen=True, slots=True)
class GeneratedRollouts:
    """The completions of a step, group after group."""

    prompts: list[Prompt]
    completions: list[Completion]
    rewards: PendingRewards
    """Rewards of all completions, in their order."""
    memory: dict[str, MemorySample]
    """Memory of the engines' processes, by name."""
    left: list[PartialGroup] = field(default_factory=list)
    """Groups that the step leaves for the next one."""
    prompts_drawn: int = 0
    """See `RolloutBatch`."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the generation."""


@dataclass(frozen=True, slots=True)
class CompleteGroup:
    """A group of a step that is complete while others are not."""

    place: int
    """Place of its prompt in the step."""
    prompt: Prompt
    completions: Sequence[Completion]
    rewards: Callable[[], KnownRewards | None]
    """Returns its rewards; None if they are not known yet."""


@dataclass(frozen=True, slots=True)
class BegunRollouts:
    """Rollouts of a step that are being generated."""

    step: int
    engines_ended: int
    """`Roles.engines_ended` when they began."""
    generation: Served
    """Gives the engines more work, if it is served."""
    finish: Callable[[], GeneratedRollouts]
    """Waits for them."""


@dataclass(slots=True)
class ResponseLengths:
    """Response lengths by item of the task, in tokens."""

    _mean_by_item: dict[int, float] = field(default_factory=dict, init=False)
    """Mean of the last group of each item."""
    _tokens: int = field(default=0, init=False)
    _responses: int = field(default=0, init=False)

    def observe(self, items: Iterable[int], lengths: Sequence[int], group_size: int) -> None:
        """Learn the lengths of the responses of a step, group after group. `items`: indices in the task."""
        for place, item in enumerate(items):
            group = lengths[place * group_size : (place + 1) * group_size]
            self._mean_by_item[item] = sum(group) / len(group)
        self._tokens += sum(lengths)
        self._responses += len(lengths)

    def expected(self, prompts: Iterable[Prompt]) -> list[float]:
        """Mean length for each prompt: of its item's responses in the last epoch that had it, otherwise of all
        responses.

        If nothing is known, all are equal. The estimate affects only the order of prompts, never the responses.
        """
        mean = self._tokens / self._responses if self._responses else 1.0
        return [self._mean_by_item.get(prompt.index, mean) for prompt in prompts]


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """Begins to generate the rollouts of a step."""

    algorithm: AlgorithmSpec
    task: Task
    scorer: Scorer
    roles: Roles
    _lengths: ResponseLengths = field(default_factory=ResponseLengths, init=False)

    def begin(
        self, step: int, positions: Sequence[int], on_group: Callable[[CompleteGroup], None] = lambda _group: None
    ) -> BegunRollouts:
        """Generate for the prompts at `positions` of the sequence of all prompts. `on_group`: called with each group as
        soon as it is complete, when its scoring begins."""
        by_position = self._prompts(positions)
        prompts = [by_position[position] for position in positions]
        seeds = [self._seed(position) for position in positions]
        group_size = self.algorithm.group_size
        scoring = self.scorer.begin(prompts, group_size)
        queue = WorkQueue(self._lengths.expected(prompts), self.roles.settings.rollout.max_num_seqs, group_size)

        def work(places: Sequence[int]) -> WholeGroups:
            token_ids = [prompts[place].token_ids for place in places]
            return WholeGroups(places, token_ids, group_size, [seeds[place] for place in places])

        def score(place: int, group: Sequence[Completion]) -> None:
            scoring.add(place * group_size, group)
            indices = range(place * group_size, (place + 1) * group_size)
            on_group(CompleteGroup(place, prompts[place], group, partial(scoring.known, indices)))

        generation = self.roles.generate(step, queue, work, score)

        def finish() -> GeneratedRollouts:
            groups, memory = generation.finish()
            completions = [completion for group in groups for completion in group]
            return GeneratedRollouts(prompts, completions, scoring, memory)

        return BegunRollouts(step, self.roles.engines_ended, generation, finish)

    def begin_partial(self, step: int, left_before: Sequence[PartialGroup]) -> BegunRollouts:
        """Generate until the step's quota of groups is complete. `left_before`: groups that the step before has left.

        The groups of one engine are scored while others still generate, or the policy learns.
        """
        group_size, quota = self.algorithm.group_size, self.algorithm.prompts_per_step
        new = [
            unstarted(position, group_size)
            for position in new_positions(
                step, self.algorithm.steps, quota, self.algorithm.partial_rollout_prompts, len(left_before)
            )
        ]
        prompts = self._prompts([group.position for group in (*left_before, *new)])

        def held(group: PartialGroup) -> HeldGroup:
            return HeldGroup(group, prompts[group.position].token_ids, self._seed(group.position))

        groups = [*left_before, *new]
        lots = deal(
            [held(group) for group in left_before], [held(group) for group in new], quota, self.roles.engine_count
        )
        place_of = {group.position: place for place, group in enumerate(groups)}
        scoring = self.scorer.begin([prompts[group.position] for group in groups], group_size)

        def score(_lot: int, result: LotResult) -> None:
            for group in result.completed:
                scoring.add(place_of[group.position] * group_size, group.responses)

        queue = WorkQueue([1.0] * len(lots), concurrent_sequences=1)  # one lot for each engine
        generation = self.roles.generate(
            step, queue, lambda places: Lots(places, [lots[place] for place in places]), score
        )

        def finish() -> GeneratedRollouts:
            results, memory = generation.finish()
            completed = in_order(group for result in results for group in result.completed)
            prompts_of_step = [prompts[group.position] for group in completed]
            completions = [response for group in completed for response in group.responses]
            places = [place_of[group.position] for group in completed]
            indices = [place * group_size + member for place in places for member in range(group_size)]
            left = in_order(group for result in results for group in result.left)
            return GeneratedRollouts(prompts_of_step, completions, ChosenRewards(scoring, indices), memory, left)

        return BegunRollouts(step, self.roles.engines_ended, generation, finish)

    def observe(self, batch: RolloutBatch) -> None:
        """Remember the lengths of the responses, for the order in which engines take prompts."""
        algorithm = self.algorithm
        if algorithm.partial_rollout_prompts or algorithm.dynamic_sampling:
            return  # the prompts of a step are those that its engines completed first, or those with different rewards
        items = self.task.items_of_step(batch.step, algorithm.prompts_per_step)
        self._lengths.observe(items, [len(response) for response in batch.response_ids], algorithm.group_size)

    def _prompts(self, positions: Sequence[int]) -> dict[int, Prompt]:
        """The prompts by position."""
        size = self.algorithm.prompts_per_step
        of_step = {step: self.task.prompts(step, size) for step in sorted({place // size + 1 for place in positions})}
        return {position: of_step[position // size + 1][position % size] for position in positions}

    def _seed(self, position: int) -> int:
        """The engine's seed for the prompt at `position`."""
        of_step, place = divmod(position, self.algorithm.prompts_per_step)
        return sampling_seed(self.algorithm.seed, of_step + 1, place)


def new_positions(step: int, steps: int, quota: int, partial: int, left_before: int) -> range:
    """Positions of the prompts whose groups begin in `step`, counted from 1, of `steps`.

    Each earlier step has completed `quota` groups; `left_before` more have begun. Beyond its quota, a step holds
    `partial` groups, and the last step none.
    """
    first = (step - 1) * quota + left_before
    held = quota + (partial if step < steps else 0)
    return range(first, first + held - left_before)


def sampling_seed(seed: int, step: int, position: int) -> int:
    """The engine's seed for the prompt at `position` of `step`. Deterministic, so that a step can be repeated."""
    digest = hashlib.sha256(f"{seed}/{step}/{position}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
