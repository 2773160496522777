"""Tokens alone decide the groups that a step completes and those that it leaves; each prompt is learned from once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.rollout.lots import (
    HeldGroup,
    Lot,
    LotResult,
    Segment,
    deal,
    generate_lot,
    in_order,
    segment_tokens,
    unstarted,
)
from rljob_trainer.rollout_batch import Completion, PartialGroup, Prompt, RolloutBatch
from rljob_trainer.runtime.step_rollouts import new_positions

MAX_TOKENS = 64
GROUP_SIZE = 2


class Engine:
    """Responses of known lengths, by the position of their prompt."""

    def __init__(self, lengths: Mapping[int, int]) -> None:
        self.lengths = lengths
        self.segments: list[list[Segment]] = []

    def __call__(self, segments: list[Segment]) -> list[Completion]:
        self.segments.append(segments)
        return [self._more(segment) for segment in segments]

    def _more(self, segment: Segment) -> Completion:
        position, so_far = segment.token_ids[0], len(segment.token_ids) - 1
        remaining = self.lengths[position] - so_far
        count = min(remaining, segment.max_tokens)
        return Completion([7] * count, [-0.5] * count, count == remaining, "")


def held(group: PartialGroup) -> HeldGroup:
    return HeldGroup(group, [group.position], 100 + group.position)


def new(*positions: int) -> list[HeldGroup]:
    return [held(unstarted(position, GROUP_SIZE)) for position in positions]


def positions(groups: Sequence[PartialGroup]) -> list[int]:
    return [group.position for group in groups]


def generated(lot: Lot, lengths: Mapping[int, int], version: int = 3) -> LotResult:
    return generate_lot(lot, MAX_TOKENS, version, Engine(lengths))


def test_the_longest_responses_are_left_with_the_tokens_that_they_have() -> None:
    [lot] = deal([], new(0, 1, 2, 3), quota=3, lots=1)
    result = generated(lot, {0: 5, 1: 60, 2: 17, 3: 3})
    assert positions(result.completed) == [0, 2, 3]
    [left] = result.left
    assert left.position == 1
    assert [len(response.token_ids) for response in left.responses] == [24, 24], "three segments of 8, as long as 17"
    assert set(left.responses[0].weights_versions) == {3}


def test_what_was_left_is_completed_first_with_the_next_weights() -> None:
    [lot] = deal([], new(0, 1), quota=1, lots=1)
    [before] = generated(lot, {0: 64, 1: 3}, version=3).left
    [lot] = deal([held(before)], new(2, 3), quota=2, lots=1)
    result = generated(lot, {0: 64, 2: 4, 3: 30}, version=4)
    assert positions(result.completed) == [0, 2], "the step waits for it"
    assert [list(r.weights_versions) for r in result.completed[0].responses] == [[3] * 8 + [4] * 56] * GROUP_SIZE
    assert result.left[0].is_complete(MAX_TOKENS), "what ends meanwhile waits for the next step"


def test_of_groups_that_end_in_one_segment_the_first_is_taken() -> None:
    [lot] = deal([], new(4, 5, 6), quota=1, lots=1)
    assert positions(generated(lot, {4: 8, 5: 1, 6: 2}).completed) == [4]


def test_a_group_that_was_left_complete_needs_no_tokens() -> None:
    [lot] = deal([], new(0, 1), quota=1, lots=1)
    [before] = generated(lot, {0: 2, 1: 2}).left
    engine = Engine({})
    [lot] = deal([held(before)], [], quota=1, lots=1)
    assert generate_lot(lot, MAX_TOKENS, 4, engine) == LotResult([before], [])
    assert not engine.segments


def test_a_response_is_cut_at_the_token_limit() -> None:
    [lot] = deal([], new(0), quota=1, lots=1)
    [group] = generated(lot, {0: MAX_TOKENS + 9}).completed
    assert [(len(r.token_ids), r.finished) for r in group.responses] == [(MAX_TOKENS, False)] * GROUP_SIZE


@given(st.integers(1, 70))
def test_no_segment_has_the_seed_of_another_or_exceeds_the_limit(max_tokens: int) -> None:
    engine = Engine({0: 1000, 1: 1000})
    [lot] = deal([], new(0, 1), quota=2, lots=1)
    generate_lot(lot, max_tokens, 0, engine)
    segments = [segment for call in engine.segments for segment in call]
    assert len({segment.seed for segment in segments}) == len(segments)
    assert all(len(segment.token_ids) - 1 + segment.max_tokens <= max_tokens for segment in segments)
    assert len(engine.segments) <= 8
    assert segment_tokens(max_tokens) * 8 >= max_tokens


@given(st.integers(1, 20), st.integers(0, 19), st.integers(0, 20), st.integers(1, 8))
def test_every_lot_can_meet_its_quota(quota: int, left: int, begun: int, lots: int) -> None:
    left = min(left, quota)
    begun = max(begun, quota - left)
    dealt = deal(new(*range(left)), new(*range(left, left + begun)), quota, lots)
    assert len(dealt) == lots
    assert sum(lot.quota for lot in dealt) == quota
    assert all(lot.left_before <= lot.quota <= len(lot.held) for lot in dealt)
    assert sorted(each.group.position for lot in dealt for each in lot.held) == list(range(left + begun))


def test_a_quota_without_enough_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a quota between 0 and 1 groups, found 2"):
        deal([], new(0), quota=2, lots=1)


@given(st.data(), st.integers(2, 6), st.integers(1, 5), st.integers(1, 4), st.integers(1, 7))
def test_a_job_learns_from_each_prompt_once_and_leaves_none_twice(
    data: st.DataObject, quota: int, partial: int, engines: int, steps: int
) -> None:
    partial = min(partial, quota - 1)
    count = quota * steps
    lengths = dict(enumerate(data.draw(st.lists(st.integers(1, MAX_TOKENS), min_size=count, max_size=count))))
    left: list[PartialGroup] = []
    learned: list[list[int]] = []
    for step in range(1, steps + 1):
        lots = deal(
            [held(group) for group in left], new(*new_positions(step, steps, quota, partial, len(left))), quota, engines
        )
        order = data.draw(st.permutations(range(engines)))
        results = {number: generated(lots[number], lengths, version=step) for number in order}
        due, left = set(positions(left)), in_order(group for result in results.values() for group in result.left)
        completed = [group for result in results.values() for group in result.completed]
        assert due <= set(positions(completed)), "what a step has left, the next one completes"
        assert len(completed) == quota
        assert len(left) == (partial if step < steps else 0)
        versions = {version for group in completed for r in group.responses for version in r.weights_versions}
        assert versions <= {step - 1, step}
        learned.append(positions(completed))
    assert sorted(position for of_step in learned for position in of_step) == list(range(count))


def test_a_journal_keeps_what_is_left_and_the_version_of_each_token(tmp_path: Path) -> None:
    one = Completion([1, 2, 3], [-0.5, -0.25, -1.0], True, "abc", [4, 4, 5])
    other = Completion([9], [-0.125], False, "d", [5])
    left = [PartialGroup(11, [replaced(one), replaced(other)]), unstarted(12, 2)]
    rewards, advantages = np.ones(2, np.float32), np.zeros(2, np.float32)
    batch = RolloutBatch.of(6, 2, [Prompt(0, [1], "")], [one, other]).scored(rewards, advantages)
    saved = RolloutBatch(**{name: getattr(batch, name) for name in batch.__slots__} | {"left": left})
    saved.save(tmp_path / "step.npz")
    loaded = RolloutBatch.load(tmp_path / "step.npz")
    assert [versions.tolist() for versions in loaded.token_versions] == [[4, 4, 5], [5]]
    assert loaded.continued == [2]
    assert positions(loaded.left) == [11, 12]
    for before, after in zip(left, loaded.left, strict=True):
        for one, other in zip(before.responses, after.responses, strict=True):
            assert (list(one.token_ids), list(one.logprobs)) == (other.token_ids, other.logprobs)
            assert (list(one.weights_versions), one.finished) == (other.weights_versions, other.finished)


def replaced(completion: Completion) -> Completion:
    return Completion(completion.token_ids, completion.logprobs, completion.finished, "", completion.weights_versions)


def test_completions_of_one_version_need_no_versions_of_tokens(tmp_path: Path) -> None:
    batch = RolloutBatch.of(6, 1, [Prompt(0, [1], "")], [Completion([1], [-1.0], True, "")])
    batch.save(tmp_path / "step.npz")
    loaded = RolloutBatch.load(tmp_path / "step.npz")
    assert (loaded.token_versions, loaded.left, loaded.continued) == ([], [], [])
