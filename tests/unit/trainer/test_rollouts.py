"""Rollouts of a step: tokens alone decide the groups that it completes and leaves, and the file keeps all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
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


class EngineOfKnownLengths:
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
    return generate_lot(lot, MAX_TOKENS, version, EngineOfKnownLengths(lengths))


def test_the_longest_responses_are_left_and_completed_first_next_time() -> None:
    [lot] = deal([], new(0, 1, 2, 3), quota=3, lots=1)
    result = generated(lot, {0: 5, 1: 64, 2: 17, 3: 3}, version=3)
    assert positions(result.completed) == [0, 2, 3]
    [left] = result.left
    assert (left.position, [len(response.token_ids) for response in left.responses]) == (1, [24, 24]), "as long as 17"
    [lot] = deal([held(left)], new(4, 5), quota=2, lots=1)
    result = generated(lot, {1: 64, 4: 4, 5: 30}, version=4)
    assert positions(result.completed) == [1, 4], "the step waits for it"
    assert [list(r.weights_versions) for r in result.completed[0].responses] == [[3] * 24 + [4] * 40] * GROUP_SIZE
    assert result.left[0].is_complete(MAX_TOKENS), "a response that ends earlier waits for the next step"


def test_of_groups_that_end_together_the_first_is_taken() -> None:
    [lot] = deal([], new(4, 5), quota=1, lots=1)
    result = generated(lot, {4: 8, 5: 1})
    assert (positions(result.completed), positions(result.left)) == ([4], [5])
    engine = EngineOfKnownLengths({})
    [lot] = deal([held(result.left[0])], [], quota=1, lots=1)
    assert generate_lot(lot, MAX_TOKENS, 4, engine) == LotResult(result.left, [])
    assert not engine.segments


@given(st.integers(1, 70))
def test_no_segment_has_the_seed_of_another_or_exceeds_the_limit(max_tokens: int) -> None:
    engine = EngineOfKnownLengths({0: 1000, 1: 1000})
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


def test_too_few_groups_or_completions_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a quota between 0 and 1 groups, found 2"):
        deal([], new(0), quota=2, lots=1)
    with pytest.raises(ValueError, match="1 prompts × 2 completions, found 1"):
        RolloutBatch.of(1, 2, [Prompt(0, [1], "")], [Completion([1], [-1.0], True, "")])


@given(st.data(), st.integers(2, 6), st.integers(1, 5), st.integers(1, 4), st.integers(1, 7))
def test_a_job_learns_from_each_prompt_once_and_leaves_none_twice(
    data: st.DataObject, quota: int, partial: int, engines: int, steps: int
) -> None:
    partial = min(partial, quota - 1)
    count = quota * steps
    lengths = dict(enumerate(data.draw(st.lists(st.integers(1, MAX_TOKENS + 9), min_size=count, max_size=count))))
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
        for group in completed:
            length = lengths[group.position]
            for response in group.responses:
                assert len(response.token_ids) == min(length, MAX_TOKENS), "cut at the token limit"
                assert response.finished is (length <= MAX_TOKENS)
                assert set(response.weights_versions) <= {step - 1, step}
        learned.append(positions(completed))
    assert sorted(position for of_step in learned for position in of_step) == list(range(count))


# --- in a file ---


def completions(size: int, versions: bool) -> st.SearchStrategy[list[Completion]]:
    one = st.builds(
        lambda ids, finished: Completion(
            ids, [-0.25 * (i % 100) for i in ids], finished, "", sorted(i % 3 for i in ids) if versions else []
        ),
        st.lists(st.integers(0, 2**31 - 1), max_size=6),
        st.booleans(),
    )
    return st.lists(one, min_size=size, max_size=size)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_a_saved_batch_loads_unchanged(
    tmp_path: Path, data: st.DataObject, prompts: int, group_size: int, partial: bool
) -> None:
    """`partial`: of a step that leaves groups, and whose tokens are of several versions of the weights."""
    asked = [
        Prompt(index, data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=5)), "") for index in range(prompts)
    ]
    answered = data.draw(completions(prompts * group_size, partial))
    left = [PartialGroup(11, data.draw(completions(group_size, partial))), unstarted(12, group_size)] if partial else []
    rewards = np.linspace(-1, 1, len(answered), dtype=np.float32)
    batch = RolloutBatch.of(7, group_size, asked, answered).scored(rewards, -rewards)
    batch = replace(batch, left=left, prompts_drawn=31, metrics={"sampling_rounds": 2.0} if partial else {})
    assert batch.prompt_tokens == sum(len(p.token_ids) for p in asked) * group_size
    assert batch.response_tokens == sum(len(c.token_ids) for c in answered)
    by_version = [sorted(map(list(c.weights_versions).count, set(c.weights_versions))) for c in answered]
    assert len(batch.continued) == sum(len(counts) > 1 for counts in by_version)

    batch.save(tmp_path / "batch.npz")
    loaded = RolloutBatch.load(tmp_path / "batch.npz")

    assert (loaded.step, loaded.group_size, len(loaded)) == (7, group_size, len(answered))
    for name in ("prompt_ids", "response_ids", "rollout_logprobs", "token_versions"):
        before, after = getattr(batch, name), getattr(loaded, name)
        assert len(before) == len(after)
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(one, other)
    for name in ("finished", "rewards", "advantages"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(loaded, name))
    assert (loaded.prompts_drawn, loaded.metrics) == (31, batch.metrics)
    assert (loaded.continued, positions(loaded.left)) == (batch.continued, positions(left))
    for group, same in zip(left, loaded.left, strict=True):
        assert list(map(contents, group.responses)) == list(map(contents, same.responses))


def contents(response: Completion) -> tuple[list[int], list[float], list[int], bool]:
    return (
        list(response.token_ids),
        list(response.logprobs),
        list(response.weights_versions),
        response.finished,
    )
