from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.algorithm.loss_config import LossConfig
from rljob_trainer.algorithm.micro_batch import (
    MicroBatch,
    completions_with_tokens,
    dropped_tokens,
    micro_batches_of,
    token_weights,
    with_gradient,
)
from rljob_trainer.rollout_batch import RolloutBatch


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


def by_completion(micro_batch: MicroBatch, values: npt.NDArray[np.int64]) -> list[tuple[int, npt.NDArray[np.int64]]]:
    """The rows or tokens of [T] by completion, split as the log-probabilities are."""
    return list(micro_batch.by_completion(values))  # type: ignore[arg-type]


def all_micro_batches(batch: RolloutBatch, ranks: int, budget: int, *, packed: bool = False) -> list[MicroBatch]:
    completions = completions_with_tokens(batch)
    return [
        micro_batch
        for rank in range(ranks)
        for micro_batch in micro_batches_of(
            batch, completions, rank=rank, ranks=ranks, budget_tokens=budget, aggregation="token-mean", packed=packed
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


tokens = st.integers(1, 99)


@given(
    prompts=st.lists(st.lists(tokens, min_size=1, max_size=8), min_size=1, max_size=5),
    responses=st.data(),
    ranks=st.integers(1, 4),
    budget=st.integers(1, 60),
)
def test_no_response_token_is_lost_or_repeated(
    prompts: list[list[int]], responses: st.DataObject, ranks: int, budget: int
) -> None:
    drawn = [responses.draw(st.lists(tokens, max_size=8)) for _ in range(2 * len(prompts))]
    batch = batch_of(prompts, drawn, group_size=2)
    found: dict[int, list[int]] = {}
    for micro_batch in all_micro_batches(batch, ranks, budget):
        flat = micro_batch.input_ids.reshape(-1)
        rows = dict(by_completion(micro_batch, micro_batch.hidden_rows))
        for completion, targets in by_completion(micro_batch, micro_batch.targets):
            assert completion not in found
            found[completion] = targets.tolist()
            # Up to the row that predicts the last token stand the prompt and the rest of the response.
            prompt = prompts[completion // 2]
            seen = flat[rows[completion][0] - len(prompt) + 1 : rows[completion][-1] + 1].tolist()
            assert seen == prompt + targets.tolist()[:-1]
    assert found == {i: ids for i, ids in enumerate(drawn) if ids}


@given(
    prompts=st.lists(st.lists(tokens, min_size=1, max_size=8), min_size=1, max_size=5),
    responses=st.data(),
    ranks=st.integers(1, 4),
    budget=st.integers(1, 60),
)
def test_packed_rows_hold_every_sequence_end_to_end(
    prompts: list[list[int]], responses: st.DataObject, ranks: int, budget: int
) -> None:
    drawn = [responses.draw(st.lists(tokens, max_size=8)) for _ in range(2 * len(prompts))]
    batch = batch_of(prompts, drawn, group_size=2)
    found: set[int] = set()
    for micro_batch in all_micro_batches(batch, ranks, budget, packed=True):
        [row] = micro_batch.input_ids
        assert micro_batch.packed_lengths is not None
        assert len(row) == sum(micro_batch.packed_lengths) >= 2
        sequences = np.split(row, np.cumsum(micro_batch.packed_lengths)[:-1])
        for place, (completion, targets) in enumerate(by_completion(micro_batch, micro_batch.targets)):
            sequence = prompts[completion // 2] + drawn[completion][:-1]
            assert sequences[place].tolist() == sequence
            assert targets.tolist() == drawn[completion]
            rows = dict(by_completion(micro_batch, micro_batch.hidden_rows))[completion]
            first = sum(micro_batch.packed_lengths[:place])
            assert rows.tolist() == list(range(first + len(prompts[completion // 2]) - 1, first + len(sequence)))
        found |= set(micro_batch.completions)
    assert found == {i for i, ids in enumerate(drawn) if ids}


@given(st.lists(st.integers(0, 8), min_size=2, max_size=12), st.integers(1, 4), st.integers(1, 60))
def test_the_weights_of_all_ranks_sum_to_one(lengths: list[int], ranks: int, budget: int) -> None:
    batch = batch_of([[1]] * len(lengths), [[7] * length for length in lengths], group_size=1)
    total = sum(float(part.loss_weights.sum()) for part in all_micro_batches(batch, ranks, budget))
    assert total == pytest.approx(1.0 if any(lengths) else 0.0, abs=1e-5)


def test_an_empty_micro_batch_has_only_padding_and_nothing_to_learn() -> None:
    first, second = all_micro_batches(batch_of([[1, 2]], [[3]], group_size=1), ranks=2, budget=10)
    assert first.completions == [0]
    assert second.input_ids.tolist() == [[0, 0], [0, 0]]
    assert len(second.targets) == len(second.hidden_rows) == len(second.loss_weights) == 0


def test_only_completions_with_an_advantage_have_a_gradient() -> None:
    batch = batch_of([[1], [2]], [[5], [6], [7], [8]], group_size=2)
    batch = batch.scored(batch.rewards, np.array([0, 0, 1, -1]))
    assert with_gradient(batch, [0, 1, 2, 3], LossConfig()) == [2, 3]
    assert with_gradient(batch, [0, 1, 2], LossConfig(kl_coefficient=0.1)) == [0, 1, 2]
    assert with_gradient(batch, [0, 1, 2], LossConfig(entropy_coefficient=0.1)) == [0, 1, 2]
    assert with_gradient(batch, [1, 0], LossConfig()) == [1]
    assert with_gradient(batch, [], LossConfig()) == []


def test_skipped_completions_count_in_the_loss_but_not_in_means() -> None:
    batch = batch_of([[1], [2]], [[5], [6], [7], [8]], group_size=2)
    [micro_batch] = micro_batches_of(
        batch, [0, 1, 2, 3], rank=0, ranks=1, budget_tokens=100, aggregation="token-mean", processed=[2, 3]
    )
    assert micro_batch.completions == [2, 3]
    assert micro_batch.loss_weights.tolist() == [0.25, 0.25]
    assert micro_batch.mean_weights.tolist() == [0.5, 0.5]


def test_an_empty_prompt_is_refused_since_nothing_predicts_the_first_token() -> None:
    with pytest.raises(ValueError, match="at least one token for completion 1"):
        all_micro_batches(batch_of([[1], []], [[3], [4]], group_size=1), ranks=1, budget=10)


def test_token_mean_weighs_tokens_alike_and_sequence_mean_completions() -> None:
    logprobs = [np.zeros(3, np.float32), np.zeros(0, np.float32), np.zeros(1, np.float32)]
    assert [weights.tolist() for weights in token_weights(logprobs, "token-mean")] == [[0.25] * 3, [], [0.25]]
    by_sequence = token_weights(logprobs, "sequence-mean")
    np.testing.assert_allclose(by_sequence[0], 1 / 6, rtol=1e-6)
    assert by_sequence[2].tolist() == [0.5]


def test_a_token_without_a_finite_log_probability_is_in_no_denominator() -> None:
    logprobs = [np.array([-1, -np.inf, np.nan], np.float32), np.array([-1], np.float32)]
    assert [weights.tolist() for weights in token_weights(logprobs, "token-mean")] == [[0.5, 0, 0], [0.5]]
    assert [weights.tolist() for weights in token_weights(logprobs, "sequence-mean")] == [[0.5, 0, 0], [0.5]]
    assert dropped_tokens(logprobs) == 2
