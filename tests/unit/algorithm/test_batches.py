"""The division of a step's completions into updates, ranks and micro-batches, and the contents of a micro-batch."""

from __future__ import annotations

from dataclasses import fields
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rljob_api.algorithm import AlgorithmSpec
from rljob_api.algorithms import LossAggregation
from rljob_trainer.algorithm.division import plan_micro_batches, plan_with_shared_prompts
from rljob_trainer.algorithm.micro_batch import (
    MicroBatch,
    completions_with_tokens,
    dropped_tokens,
    loss_normalizer,
    micro_batches_of,
    split_updates,
    token_weights,
    with_gradient,
)
from rljob_trainer.algorithm.packing import BOUNDS
from rljob_trainer.rollout_batch import RolloutBatch

BY_TOKENS = AlgorithmSpec(steps=1, loss_aggregation="TokenMean")

# --- the division ---


@pytest.mark.parametrize("packed", [False, True])
@given(lengths=st.lists(st.integers(1, 300), max_size=60), ranks=st.integers(1, 8), budget=st.integers(1, 1000))
@example(lengths=[9, 8], ranks=1, budget=4)
def test_ranks_get_each_sequence_once_within_the_budget(
    lengths: list[int], ranks: int, budget: int, packed: bool
) -> None:
    plan = plan_micro_batches(lengths, ranks, budget, packed=packed)
    assert plan == plan_micro_batches(list(lengths), ranks, budget, packed=packed)
    assert sorted(chain.from_iterable(chain.from_iterable(plan))) == list(range(len(lengths)))
    [count] = {len(rank) for rank in plan}
    assert count >= 1
    for micro_batch in chain.from_iterable(plan):
        sizes = [lengths[sequence] for sequence in micro_batch]
        assert len(sizes) < 2 or (sum(sizes) if packed else len(sizes) * max(sizes)) <= budget
    if packed:
        for rank in plan:
            filled = [sum(lengths[sequence] for sequence in micro_batch) for micro_batch in rank if micro_batch]
            if len(filled) > 1:
                assert max(filled) - min(filled) <= max(lengths)
                assert sum(filled) > budget, "one micro-batch would do"
    else:
        loads = [sum(lengths[sequence] for sequence in chain.from_iterable(rank)) for rank in plan]
        assert max(loads) - min(loads) <= max(lengths, default=0)


@pytest.mark.parametrize(
    ("lengths", "ranks", "budget", "plan"),
    [
        ([4, 3, 2, 1], 2, 100, [[[0, 3]], [[1, 2]]]),  # the longest and the shortest go to one rank
        ([10, 100, 11, 99, 12], 1, 200, [[[1, 3], [4, 2, 0]]]),  # similar lengths share one, the longest come first
        ([5, 5], 3, 10, [[[0]], [[1]], [[]]]),  # a rank without a share
        ([9, 9, 9], 2, 10, [[[0], []], [[1], [2]]]),  # a rank with a smaller share
    ],
)
def test_similar_lengths_share_a_micro_batch(
    lengths: list[int], ranks: int, budget: int, plan: list[list[list[int]]]
) -> None:
    assert plan_micro_batches(lengths, ranks, budget) == plan


def test_equal_lengths_are_divided_evenly() -> None:
    """Not into nine micro-batches of seven and one of a single row, which torch.compile would compile again."""
    assert [len(part) for part in plan_micro_batches([528] * 64, 1, 4096)[0]] == [6] * 6 + [7] * 4


@given(st.lists(st.integers(1, 200), min_size=2, max_size=60), st.integers(600, 1000))
def test_no_sequence_is_alone_if_three_of_its_length_fit(lengths: list[int], budget: int) -> None:
    assert min(map(len, plan_micro_batches(lengths, 1, budget)[0])) > 1


def test_padding_is_less_than_a_tenth_of_spread_lengths() -> None:
    draw = np.random.default_rng(0)
    lengths = np.minimum(draw.lognormal(6.0, 0.8, 512).astype(int) + 32, 2048).tolist()
    for budget in (8_192, 16_384, 65_536):
        plan = plan_micro_batches(lengths, 1, budget)[0]
        tokens = sum(len(part) * max(lengths[sequence] for sequence in part) for part in plan)
        assert tokens - sum(lengths) < 0.1 * tokens
        assert len(plan) < 2 * sum(lengths) / budget + 16


@given(
    prompts=st.lists(st.integers(1, 100), max_size=8),
    draws=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 100)), max_size=40),
    ranks=st.integers(1, 4),
    budget=st.integers(1, 1000),
)
def test_groups_that_share_a_prompt_are_divided_within_the_budget(
    prompts: list[int], draws: list[tuple[int, int]], ranks: int, budget: int
) -> None:
    draws = [(group, length) for group, length in draws if group < len(prompts)]
    groups, lengths = [group for group, _ in draws], [prompts[group] + length for group, length in draws]
    division, shared = plan_with_shared_prompts(lengths, [prompts[group] for group in groups], groups, ranks, budget)
    assert sorted(chain.from_iterable(chain.from_iterable(division))) == list(range(len(lengths)))
    [count] = {len(rank) for rank in division}
    assert count >= 1
    alone = plan_micro_batches(lengths, ranks, budget, packed=True)
    assert shared or division == alone
    for micro_batch in chain.from_iterable(division):
        once = sum(draws[i][1] for i in micro_batch) + sum(prompts[group] for group in {groups[i] for i in micro_batch})
        assert len(micro_batch) < 2 or (once if shared else sum(lengths[i] for i in micro_batch)) <= budget


@pytest.mark.parametrize(
    ("prompt", "responses", "ranks", "micro_batches", "tokens"),
    [
        (1000, [500] * 16, 1, 2, 10_000),  # its prompt twice, as the budget is 8,192
        (1000, [500] * 16, 4, 1, 4 * 3000),  # once on each rank
        (1000, [500] * 8, 1, 1, 5000),
        (10, [300] * 16, 1, 1, 16 * 310),  # too short to be shared
        (1000, [500], 1, 1, 1500),  # nobody to share it with
    ],
)
def test_prompts_are_shared_where_that_saves_tokens(
    prompt: int, responses: list[int], ranks: int, micro_batches: int, tokens: int
) -> None:
    count = len(responses)
    lengths = [prompt + length for length in responses]
    division, shared = plan_with_shared_prompts(lengths, [prompt] * count, [0] * count, ranks, 8192)
    assert [len(rank) for rank in division] == [micro_batches] * ranks
    parts = list(chain.from_iterable(division))
    copies = len(parts) if shared else count
    assert copies * prompt + sum(responses) == tokens


@given(st.lists(st.integers(0, 1000), unique=True, max_size=50), st.integers(1, 6))
def test_updates_part_the_completions_evenly_and_in_order(completions: list[int], updates: int) -> None:
    parts = split_updates(completions, updates)
    assert list(chain.from_iterable(parts)) == completions
    assert len(parts) == updates
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


# --- the contents ---


def batch_of(prompts: list[list[int]], responses: list[list[int]], group_size: int) -> RolloutBatch:
    """Token t of completion i has the engine's log-probability −(i + t / 100); completion i has advantage i."""
    return RolloutBatch(
        step=1,
        group_size=group_size,
        prompt_ids=[np.array(ids, np.int32) for ids in prompts],
        response_ids=[np.array(ids, np.int32) for ids in responses],
        rollout_logprobs=[-(i + np.arange(len(ids)) / 100).astype(np.float32) for i, ids in enumerate(responses)],
        finished=np.ones(len(responses), np.bool_),
    ).scored(np.zeros(len(responses), np.float32), np.arange(len(responses), dtype=np.float32))


def all_micro_batches(
    batch: RolloutBatch, ranks: int, budget: int, *, packed: bool = False, shared: bool = False
) -> list[MicroBatch]:
    completions = completions_with_tokens(batch)
    return [
        micro_batch
        for rank in range(ranks)
        for micro_batch in micro_batches_of(
            batch,
            completions,
            rank=rank,
            ranks=ranks,
            budget_tokens=budget,
            algorithm=BY_TOKENS,
            packed=packed,
            shared=shared,
        )
    ]


def test_hidden_state_rows_are_those_that_predict_the_response() -> None:
    batch = batch_of([[11, 12, 13]], [[21, 22], [31]], group_size=2)
    [micro_batch] = all_micro_batches(batch, 1, 100)
    assert micro_batch.input_ids.tolist() == [[11, 12, 13, 21], [11, 12, 13, 0]]
    assert micro_batch.hidden_rows.tolist() == [2, 3, 6]
    assert micro_batch.targets.tolist() == [21, 22, 31]
    assert micro_batch.advantages.tolist() == [0, 0, 1]
    np.testing.assert_allclose(micro_batch.rollout_logprobs, [0, -0.01, -1])
    np.testing.assert_allclose(micro_batch.loss_weights, 1 / 3)


def test_a_shared_prompt_comes_before_its_responses() -> None:
    """Completion 0 has one token, so that the last token of its prompt alone predicts it."""
    prompts, responses = [[11] * 5, [12, 13, 14, 15]], [[21], [22], [31, 32, 33], [41, 42]]
    [micro_batch] = all_micro_batches(batch_of(prompts, responses, group_size=2), 1, 100, packed=True, shared=True)
    assert micro_batch.completions == [2, 3, 0, 1]
    assert micro_batch.input_ids.tolist() == [[12, 13, 14, 15, 11, 11, 11, 11, 11, 31, 32, 41]]
    bounds = [[0, 4, 9, 11, 12], [0, 4], [0, 3]]
    assert [micro_batch.packing[name].tolist() for name in BOUNDS] == bounds
    assert micro_batch.packing["sizes"] == (8, 4, 9, 12, 4, 4)
    assert micro_batch.hidden_rows.tolist() == [3, 9, 10, 3, 11, 8, 8]
    assert micro_batch.targets.tolist() == [31, 32, 33, 41, 42, 21, 22]
    assert micro_batch.advantages.tolist() == [2, 2, 2, 3, 3, 0, 1]


some_tokens = st.lists(st.integers(1, 99), max_size=8)


def texts(micro_batch: MicroBatch) -> list[list[int]]:
    """The tokens that each token of a packed row attends to."""
    row, texts = micro_batch.input_ids[0].tolist(), []
    bounds, prompts, responses = (micro_batch.packing[name].tolist() for name in BOUNDS)
    sizes = micro_batch.packing["sizes"]
    for start, stop in pairwise(bounds):
        before = [place for place in responses if place <= start - sizes.first]
        is_continuing = sizes.first <= start < sizes.last
        prompt = row[prompts[len(before) - 1] : prompts[len(before)]] if is_continuing else []
        texts += [prompt + row[start:end] for end in range(start + 1, stop + 1)]
    return texts


@pytest.mark.parametrize("layout", [{}, {"packed": True}, {"packed": True, "shared": True}], ids=str)
@given(
    groups=st.lists(st.tuples(some_tokens.filter(bool), some_tokens, some_tokens), min_size=1, max_size=5),
    ranks=st.integers(1, 4),
    budget=st.integers(1, 60),
)
def test_no_response_token_is_lost_repeated_or_behind_another_text(
    groups: list[tuple[list[int], list[int], list[int]]], ranks: int, budget: int, layout: dict[str, bool]
) -> None:
    prompts, responses = [prompt for prompt, *_ in groups], [each for _, *both in groups for each in both]
    micro_batches = all_micro_batches(batch_of(prompts, responses, 2), ranks, budget, **layout)
    weights = sum(float(micro_batch.loss_weights.sum()) for micro_batch in micro_batches)
    assert weights == pytest.approx(1.0 if any(responses) else 0.0, abs=1e-5), "of all ranks"
    found: dict[int, list[int]] = {}
    for micro_batch in micro_batches:
        flat = micro_batch.input_ids.reshape(-1)
        rows, targets = (
            dict(zip(micro_batch.completions, values.split(micro_batch.response_lengths), strict=True))
            for values in (micro_batch.hidden_rows, micro_batch.targets)
        )
        if "packed" in layout:
            position_ids = micro_batch.packing["position_ids"]
            assert micro_batch.input_ids.shape == position_ids.shape == (1, micro_batch.packing["bounds"][-1])
            assert len(flat) >= 2
            positions, read = position_ids[0].tolist(), texts(micro_batch)
        else:
            positions = list(range(micro_batch.input_ids.shape[1])) * len(micro_batch.input_ids)
            read = [flat[row - positions[row] : row + 1].tolist() for row in range(len(flat))]
        for completion in micro_batch.completions:
            assert completion not in found
            found[completion] = targets[completion].tolist()
            # Each token is predicted by what stands before it: the prompt and the rest of the response.
            for place, row in enumerate(rows[completion].tolist()):
                assert read[row] == prompts[completion // 2] + found[completion][:place]
                assert positions[row] == len(read[row]) - 1
    assert found == {i: ids for i, ids in enumerate(responses) if ids}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("responses", [[[4, 5, 6], [7]], [[], []]])
def test_each_tensor_of_a_moved_micro_batch_has_memory_of_its_own(responses: list[list[int]], packed: bool) -> None:
    [micro_batch] = all_micro_batches(batch_of([[1, 2, 3]], responses, group_size=2), 1, 100, packed=packed)
    moved = micro_batch.to(torch.device("cpu"))
    names = [field.name for field in fields(micro_batch) if field.name != "packing"]
    pairs = [(getattr(micro_batch, name), getattr(moved, name)) for name in names]
    assert micro_batch.packing.keys() == moved.packing.keys()
    for before, after in [*pairs, *zip(micro_batch.packing.values(), moved.packing.values(), strict=True)]:
        if isinstance(before, torch.Tensor):
            assert after.untyped_storage().nbytes() == after.nbytes
            torch.testing.assert_close(after, before, rtol=0, atol=0)
        else:
            assert after == before


def test_an_empty_micro_batch_has_only_padding_and_nothing_to_learn() -> None:
    first, second = all_micro_batches(batch_of([[1, 2]], [[3]], group_size=1), ranks=2, budget=10)
    assert first.completions == [0]
    assert second.input_ids.tolist() == [[0, 0], [0, 0]]
    assert len(second.targets) == len(second.hidden_rows) == len(second.loss_weights) == 0


@pytest.mark.parametrize(
    ("completions", "algorithm", "chosen"),
    [
        ([0, 1, 2, 3], AlgorithmSpec(steps=1), [2, 3]),
        ([0, 1, 2], AlgorithmSpec(steps=1, kl_coefficient=0.1), [0, 1, 2]),
        ([0, 1, 2], AlgorithmSpec(steps=1, entropy_coefficient=0.1), [0, 1, 2]),
        ([1, 0], AlgorithmSpec(steps=1), [1]),
        ([], AlgorithmSpec(steps=1), []),
    ],
)
def test_only_completions_with_an_advantage_have_a_gradient(
    completions: list[int], algorithm: AlgorithmSpec, chosen: list[int]
) -> None:
    batch = batch_of([[1], [2]], [[5], [6], [7], [8]], group_size=2)
    batch = batch.scored(batch.rewards, np.array([0, 0, 1, -1]))
    assert with_gradient(batch, completions, algorithm) == chosen


def test_skipped_completions_count_in_the_loss_but_not_in_means() -> None:
    batch = batch_of([[1], [2]], [[5], [6], [7], [8]], group_size=2)
    [micro_batch] = micro_batches_of(
        batch, [0, 1, 2, 3], rank=0, ranks=1, budget_tokens=100, algorithm=BY_TOKENS, processed=[2, 3]
    )
    assert micro_batch.completions == [2, 3]
    assert micro_batch.loss_weights.tolist() == [0.25, 0.25]
    assert micro_batch.mean_weights.tolist() == [0.5, 0.5]


def test_an_empty_prompt_is_refused_since_nothing_predicts_the_first_token() -> None:
    with pytest.raises(ValueError, match="at least one token for completion 1"):
        all_micro_batches(batch_of([[1], []], [[3], [4]], group_size=1), ranks=1, budget=10)


NAN, INFINITE = np.nan, np.inf


@pytest.mark.parametrize(
    ("logprobs", "token_mean", "sequence_mean", "dropped"),
    [
        ([[0, 0, 0], [], [0]], [[0.25] * 3, [], [0.25]], [[1 / 6] * 3, [], [0.5]], 0),
        ([[-1, -INFINITE, NAN], [-1]], [[0.5, 0, 0], [0.5]], [[0.5, 0, 0], [0.5]], 2),
    ],
)
def test_tokens_with_finite_logprobs_or_completions_weigh_alike(
    logprobs: list[list[float]], token_mean: list[list[float]], sequence_mean: list[list[float]], dropped: int
) -> None:
    arrays = [np.array(each, np.float32) for each in logprobs]
    of: dict[LossAggregation, list[list[float]]] = {"TokenMean": token_mean, "SequenceMean": sequence_mean}
    for aggregation, expected in of.items():
        normalizer = loss_normalizer(arrays, AlgorithmSpec(steps=1, loss_aggregation=aggregation))
        found: list[npt.NDArray[np.float32]] = token_weights(arrays, aggregation, normalizer)
        for weights, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(weights, wanted, rtol=1e-6)
    assert dropped_tokens(arrays) == dropped
