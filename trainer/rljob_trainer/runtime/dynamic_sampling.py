"""DAPO's dynamic sampling (arXiv 2503.14476 §3.2): groups with equal rewards are replaced by groups of further prompts.

The prompts of the job are one sequence. A step generates for the next of them, in rounds, until it has
`prompts_per_step` groups whose rewards differ. It takes the first such groups in the order of the sequence, so the
result does not depend on the speed of engines or rewards. The next step begins after the last prompt that was decided
on: groups that were generated beyond it are generated again, with newer weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from rljob_trainer.rollout_batch import RolloutBatch
from rljob_trainer.runtime.step_rollouts import GeneratedRollouts
from rljob_trainer.tasks.scoring import ChosenRewards, JoinedRewards


def groups_with_signal(batch: RolloutBatch) -> list[bool]:
    """For each group of a batch with rewards, True if those of the responses that take part differ."""
    largest, smallest = (
        np.where(batch.takes_part, batch.rewards, other).reshape(-1, batch.group_size) for other in (-np.inf, np.inf)
    )
    return [bool(differs) for differs in largest.max(axis=1) > smallest.min(axis=1)]


def further_groups(has_signal: Sequence[bool], wanted: int, rounds: int, max_rounds: int) -> int:
    """Number of groups of the next round; 0 if there is none.

    `has_signal`: for each group of the `rounds` so far, True if its rewards differ. The round replaces the missing ones
    of the `wanted` groups at the rate of groups with a signal so far, with at most `wanted` groups.
    """
    found = sum(has_signal)
    if not rounds:
        return wanted
    if found >= wanted or rounds >= max_rounds:
        return 0
    return min(wanted, math.ceil((wanted - found) * len(has_signal) / found)) if found else wanted


def chosen_groups(has_signal: Sequence[bool], wanted: int) -> tuple[list[int], int]:
    """The groups that the step learns from, in their order, and the number of groups that were decided on.

    If fewer than `wanted` groups have a signal, the first others fill up the step.
    """
    with_signal = [group for group, signal in enumerate(has_signal) if signal][:wanted]
    others = [group for group, signal in enumerate(has_signal) if not signal]
    missing = wanted - len(with_signal)
    return sorted([*with_signal, *others[:missing]]), len(has_signal) if missing else with_signal[-1] + 1


def sample(
    first: int,
    wanted: int,
    max_rounds: int,
    generate: Callable[[int, int], GeneratedRollouts],
    signals: Callable[[GeneratedRollouts], Sequence[bool]],
) -> GeneratedRollouts:
    """The rollouts of a step that begins with the prompt at position `first`.

    `generate`: generates the groups of a round, from the position of its first prompt and the number of prompts.
    `signals`: waits for their rewards. Returns for each group True if its rewards differ.
    """
    rounds: list[GeneratedRollouts] = []
    has_signal: list[bool] = []
    while count := further_groups(has_signal, wanted, len(rounds), max_rounds):
        rounds.append(generate(first + len(has_signal), count))
        has_signal += signals(rounds[-1])
    prompts = [prompt for each in rounds for prompt in each.prompts]
    completions = [completion for each in rounds for completion in each.completions]
    groups, decided = chosen_groups(has_signal, wanted)
    size = len(completions) // len(prompts)
    members = [group * size + member for group in groups for member in range(size)]
    return GeneratedRollouts(
        prompts=[prompts[group] for group in groups],
        completions=[completions[member] for member in members],
        rewards=ChosenRewards(JoinedRewards([each.rewards for each in rounds]), members),
        # The first round is the largest, and has the highest peaks.
        memory={name: sample for each in reversed(rounds) for name, sample in each.memory.items()},
        prompts_drawn=first + decided,
        metrics={
            "sampling_rounds": len(rounds),
            "sampled_groups": len(prompts),
            "dropped_groups": decided - wanted,
            "missing_groups": wanted - sum(has_signal[group] for group in groups),
        },
    )
