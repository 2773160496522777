"""Dynamic sampling: the rewards alone decide which groups a step takes, and where the next step begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rljob_memory.sample import MemorySample
from rljob_trainer.rollout_batch import Completion, Prompt, RolloutBatch
from rljob_trainer.runtime.dynamic_sampling import further_groups, groups_with_signal, sample
from rljob_trainer.runtime.step_rollouts import GeneratedRollouts
from rljob_trainer.tasks.rewards import Reward
from rljob_trainer.tasks.scoring import ScoringHere

GROUP_SIZE = 2


def known(rewards: Sequence[float]) -> Reward:
    """Returns the given rewards, one in each call."""
    left = iter(rewards)
    return Reward("known", lambda completion_ids: next(left), frozenset({"completion_ids"}), label="known")


class Engine:
    """Generates groups of which those at the positions in `signals` have different rewards."""

    def __init__(self, signals: Sequence[bool]) -> None:
        self.signals = signals
        self.rounds: list[int] = []

    def generate(self, first: int, count: int) -> GeneratedRollouts:
        self.rounds.append(count)
        positions = range(first, first + count)
        completions = [Completion([position], [-1.0], True, "") for position in positions for _ in range(GROUP_SIZE)]
        rewards = [float(self.signals[each // GROUP_SIZE + first] and each % 2) for each in range(count * GROUP_SIZE)]
        prompts = [Prompt(position, [position], "") for position in positions]
        memory = {"rollout-0": MemorySample(allocated_bytes=count)}
        scoring = ScoringHere([known(rewards)]).begin(prompts, GROUP_SIZE)
        scoring.add(0, completions)
        return GeneratedRollouts(prompts, completions, scoring, memory)

    def signals_of(self, generated: GeneratedRollouts) -> list[bool]:
        return [self.signals[prompt.index] for prompt in generated.prompts]


@given(st.lists(st.booleans(), min_size=400, max_size=400), st.integers(1, 6), st.integers(2, 8), st.integers(1, 6))
def test_steps_take_the_groups_with_a_signal_in_the_order_of_the_prompts(
    signals: list[bool], wanted: int, max_rounds: int, steps: int
) -> None:
    engine, first = Engine(signals), 0
    for _ in range(steps):
        engine.rounds.clear()
        found = sample(first, wanted, max_rounds, engine.generate, engine.signals_of)
        taken = [prompt.index for prompt in found.prompts]
        assert taken == sorted(set(taken))
        assert len(taken) == wanted, "every step has the same size"
        assert engine.rounds[0] == wanted
        assert len(engine.rounds) == found.metrics["sampling_rounds"] <= max_rounds
        assert max(engine.rounds) <= wanted, "no round needs more memory than the first"
        passed = range(first, found.prompts_drawn)
        with_signal = [position for position in passed if signals[position]]
        assert [position for position in taken if signals[position]] == with_signal, "none is lost"
        assert found.metrics["missing_groups"] == wanted - len(with_signal)
        assert found.metrics["dropped_groups"] == len(passed) - wanted
        assert found.metrics["sampled_groups"] == sum(engine.rounds) >= len(passed)
        if len(with_signal) < wanted:
            assert len(engine.rounds) == max_rounds
        else:
            assert taken[-1] == found.prompts_drawn - 1, "groups beyond the last one are generated again"
        completions = [position for position in taken for _ in range(GROUP_SIZE)]
        assert [completion.token_ids[0] for completion in found.completions] == completions
        expected = [float(signals[position] and member) for position in taken for member in range(GROUP_SIZE)]
        assert found.rewards.results(stop_at_failure=True) == [expected]
        assert found.memory["rollout-0"].allocated_bytes == wanted, "the peaks of the largest round"
        first = found.prompts_drawn


def test_a_round_replaces_missing_groups_at_the_rate_so_far() -> None:
    assert further_groups([], 8, rounds=0, max_rounds=2) == 8
    assert further_groups([True] * 8, 8, rounds=1, max_rounds=9) == 0
    assert further_groups([True] * 6 + [False] * 2, 8, rounds=1, max_rounds=9) == 3, "2 of 6 / 8"
    assert further_groups([True] + [False] * 7, 8, rounds=1, max_rounds=9) == 8, "at most those of the first round"
    assert further_groups([False] * 8, 8, rounds=1, max_rounds=9) == 8
    assert further_groups([False] * 16, 8, rounds=2, max_rounds=2) == 0


def test_only_responses_that_take_part_give_a_signal() -> None:
    completions = [Completion([1], [-1.0], True, "")] * 8
    batch = RolloutBatch.of(1, 2, [Prompt(0, [1], "")] * 4, completions)
    batch = replace(batch, rewards=np.asarray([1, 0, 0.5, 0.5, 1, 0, 1, 0], np.float32))
    assert groups_with_signal(batch) == [True, False, True, True]
    kept = np.asarray([True, True, True, True, True, False, False, False])
    assert groups_with_signal(replace(batch, kept=kept)) == [True, False, False, False]
