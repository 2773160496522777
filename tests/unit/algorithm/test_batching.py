from __future__ import annotations

from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.algorithm.micro_batch import plan_micro_batches, split_updates

lengths_of_sequences = st.lists(st.integers(1, 300), max_size=60)
rank_counts = st.integers(1, 8)
budgets = st.integers(1, 1000)


@given(lengths_of_sequences, rank_counts, budgets)
def test_every_sequence_is_in_exactly_one_micro_batch(lengths: list[int], ranks: int, budget: int) -> None:
    plan = plan_micro_batches(lengths, ranks, budget)
    placed = [sequence for rank in plan for micro_batch in rank for sequence in micro_batch]
    assert sorted(placed) == list(range(len(lengths)))


@given(lengths_of_sequences, rank_counts, budgets)
def test_only_a_single_long_sequence_may_exceed_the_budget(lengths: list[int], ranks: int, budget: int) -> None:
    for micro_batch in chain.from_iterable(plan_micro_batches(lengths, ranks, budget)):
        if len(micro_batch) > 1:
            assert len(micro_batch) * max(lengths[sequence] for sequence in micro_batch) <= budget


@given(lengths_of_sequences, rank_counts, budgets)
def test_every_rank_has_the_same_number_of_micro_batches_and_at_least_one(
    lengths: list[int], ranks: int, budget: int
) -> None:
    counts = {len(micro_batches) for micro_batches in plan_micro_batches(lengths, ranks, budget)}
    assert len(counts) == 1
    assert counts.pop() >= 1


@given(lengths_of_sequences, rank_counts)
def test_ranks_get_similar_loads(lengths: list[int], ranks: int) -> None:
    plan = plan_micro_batches(lengths, ranks, 500)
    loads = [sum(lengths[sequence] for sequence in chain.from_iterable(rank)) for rank in plan]
    assert max(loads) - min(loads) <= max(lengths, default=0)


@given(lengths_of_sequences, rank_counts, budgets)
def test_the_plan_is_a_function_of_its_arguments(lengths: list[int], ranks: int, budget: int) -> None:
    assert plan_micro_batches(lengths, ranks, budget) == plan_micro_batches(list(lengths), ranks, budget)


def test_the_longest_and_the_shortest_go_to_one_rank() -> None:
    assert plan_micro_batches([4, 3, 2, 1], 2, 100) == [[[0, 3]], [[1, 2]]]


def test_similar_lengths_share_a_micro_batch_and_the_longest_come_first() -> None:
    assert plan_micro_batches([10, 100, 11, 99, 12], 1, 200) == [[[1, 3], [4, 2, 0]]]


def test_equal_lengths_are_divided_evenly() -> None:
    """Not into nine micro-batches of seven and one of a single row, which torch.compile would compile anew."""
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


@given(lengths_of_sequences, rank_counts, budgets)
def test_packed_micro_batches_are_few_full_and_alike(lengths: list[int], ranks: int, budget: int) -> None:
    plan = plan_micro_batches(lengths, ranks, budget, packed=True)
    placed = [sequence for rank in plan for micro_batch in rank for sequence in micro_batch]
    assert sorted(placed) == list(range(len(lengths)))
    assert len({len(rank) for rank in plan}) == 1
    for rank in plan:
        filled = [sum(lengths[sequence] for sequence in micro_batch) for micro_batch in rank if micro_batch]
        for tokens, micro_batch in zip(filled, rank, strict=False):
            assert tokens <= budget or len(micro_batch) == 1
        if len(filled) > 1:
            assert max(filled) - min(filled) <= max(lengths)
            assert sum(filled) > budget, "one micro-batch would do"


def test_a_rank_without_a_share_gets_empty_micro_batches() -> None:
    assert plan_micro_batches([5, 5], 3, 10) == [[[0]], [[1]], [[]]]


@given(st.lists(st.integers(0, 1000), unique=True, max_size=50), st.integers(1, 6))
def test_updates_part_the_completions_evenly_and_in_order(completions: list[int], updates: int) -> None:
    parts = split_updates(completions, updates)
    assert list(chain.from_iterable(parts)) == completions
    assert len(parts) == updates
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
