"""The rollouts of a step while they are generated: all groups of its prompts, or a quota of those that engines hold.

With partial rollouts, the prompts of the job are one sequence: those of step 1, then those of step 2, and so on. For
each step but the last, the engines hold `prompts_per_step + partial_rollout_prompts` groups: those that the step before
has left, and new ones, whose prompts follow in the sequence. The step completes `prompts_per_step` of them
(`rollout.lots`). The last step leaves none, so that a job learns from the same prompts with and without partial
rollouts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rljob_memory.sample import MemorySample
from rljob_trainer.errors import WorkerLost
from rljob_trainer.roles.roles import Roles
from rljob_trainer.rollout.lots import HeldGroup, deal, in_order, unstarted
from rljob_trainer.rollout_batch import Completion, PartialGroup, Prompt
from rljob_trainer.runtime.loop_settings import LoopSettings
from rljob_trainer.tasks.scoring import Scorer, Scoring
from rljob_trainer.tasks.task import Task


@dataclass(frozen=True, slots=True)
class GeneratedRollouts:
    """The completions of a step, group after group."""

    prompts: list[Prompt]
    completions: list[Completion]
    scoring: Scoring
    """All completions have been added to it."""
    memory: dict[str, MemorySample]
    """Of the engines' processes, by name."""
    left: list[PartialGroup] = field(default_factory=list)
    """Groups that the step leaves for the next one."""


@dataclass(frozen=True, slots=True)
class BegunRollouts:
    """Rollouts of a step that are being generated."""

    step: int
    engines_ended: int
    """`Roles.engines_ended` when they began."""
    finish: Callable[[], GeneratedRollouts]
    """Waits for them."""


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """Begins to generate the rollouts of a step."""

    settings: LoopSettings
    task: Task
    scorer: Scorer
    roles: Roles
    may_replace: Callable[[WorkerLost], bool]
    """As in `Roles.generate`."""

    def begin(self, step: int, left_before: Sequence[PartialGroup]) -> BegunRollouts:
        """`left_before`: groups that the step before has left."""
        ended = self.roles.engines_ended
        partial = self.settings.partial_rollout_prompts > 0
        return BegunRollouts(step, ended, self._of_quota(step, left_before) if partial else self._of_all(step))

    def _of_all(self, step: int) -> Callable[[], GeneratedRollouts]:
        """Responses of one engine are scored while others still generate."""
        prompts = self.task.prompts(step, self.settings.prompts_per_step)
        seeds = [sampling_seed(self.settings.seed, step, place) for place in range(len(prompts))]
        group_size = self.settings.group_size
        scoring = self.scorer.begin(prompts, group_size)
        generation = self.roles.generate(step, prompts, group_size, seeds, scoring.add, self.may_replace)

        def finish() -> GeneratedRollouts:
            completions, memory = generation.finish()
            return GeneratedRollouts(prompts, completions, scoring, memory)

        return finish

    def _of_quota(self, step: int, left_before: Sequence[PartialGroup]) -> Callable[[], GeneratedRollouts]:
        group_size, quota = self.settings.group_size, self.settings.prompts_per_step
        new = [
            unstarted(position, group_size)
            for position in new_positions(
                step, self.settings.steps, quota, self.settings.partial_rollout_prompts, len(left_before)
            )
        ]
        prompts = self._prompts([*left_before, *new])

        def held(group: PartialGroup) -> HeldGroup:
            of_step, place = divmod(group.position, quota)
            seed = sampling_seed(self.settings.seed, of_step + 1, place)
            return HeldGroup(group, prompts[group.position].token_ids, seed)

        lots = deal(
            [held(group) for group in left_before], [held(group) for group in new], quota, self.roles.engine_count
        )
        generation = self.roles.generate_lots(step, lots, self.may_replace)

        def finish() -> GeneratedRollouts:
            results, memory = generation.finish()
            completed = in_order(group for result in results for group in result.completed)
            asked = [prompts[group.position] for group in completed]
            completions = [response for group in completed for response in group.responses]
            scoring = self.scorer.begin(asked, group_size)
            scoring.add(0, completions)
            left = in_order(group for result in results for group in result.left)
            return GeneratedRollouts(asked, completions, scoring, memory, left)

        return finish

    def _prompts(self, groups: Sequence[PartialGroup]) -> dict[int, Prompt]:
        """The prompts of `groups`, by position."""
        size = self.settings.prompts_per_step
        of_step = {
            step: self.task.prompts(step, size) for step in sorted({group.position // size + 1 for group in groups})
        }
        return {group.position: of_step[group.position // size + 1][group.position % size] for group in groups}


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
