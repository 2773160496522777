"""Micro-batches: completions grouped by length, padded on the right, with the weight of each token in the loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from rljob_trainer.algorithm.loss_config import Aggregation
from rljob_trainer.rollout_batch import FloatArray, RolloutBatch

IndexArray = npt.NDArray[np.int64]
Number = TypeVar("Number", np.int64, np.float32)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B completions with T response tokens in total. All arrays of [T] are parallel, completion after completion.

    An empty micro-batch (B = 0) has T = 0 and one row with one padding token, so that a rank without a share still
    takes part in the collectives.
    """

    completions: list[int]
    """[B] Indices in the batch."""

    response_lengths: list[int]
    """[B] Tokens of each response; T in total."""

    input_ids: IndexArray
    """[B, L] Prompt and response, without the last response token, from which nothing is predicted."""

    hidden_rows: IndexArray
    """[T] Row of the flattened [B × L] hidden states that predicts the token."""

    targets: IndexArray
    """[T] The response tokens."""

    advantages: FloatArray
    """[T]"""

    rollout_logprobs: FloatArray
    """[T] Of the engine; 0 if its value is not finite."""

    loss_weights: FloatArray
    """[T] Weight in the loss."""

    mean_weights: FloatArray
    """[T] Weight in a mean over the tokens of the batch."""

    def by_completion(self, values: FloatArray) -> Iterator[tuple[int, FloatArray]]:
        """`values` of [T] by completion: its index in the batch, and its values."""
        stops = np.cumsum(self.response_lengths)
        for completion, length, stop in zip(self.completions, self.response_lengths, stops, strict=True):
            yield completion, values[stop - length : stop]


def micro_batches_of(
    batch: RolloutBatch,
    completions: Sequence[int],
    *,
    rank: int,
    ranks: int,
    budget_tokens: int,
    aggregation: Aggregation,
) -> list[MicroBatch]:
    """This rank's micro-batches of one update over `completions` of a scored batch. All ranks have the same number.

    The weights refer to all of `completions`, so that the micro-batches of all ranks add up to the whole.
    """
    logprobs = [batch.rollout_logprobs[completion] for completion in completions]
    loss_weights = dict(zip(completions, token_weights(logprobs, aggregation), strict=True))
    mean_weights = loss_weights
    if aggregation != "token-mean":
        mean_weights = dict(zip(completions, token_weights(logprobs, "token-mean"), strict=True))
    lengths = [_input_length(batch, completion) for completion in completions]
    plan = plan_micro_batches(lengths, ranks, budget_tokens)[rank]
    return [_collate(batch, [completions[place] for place in part], loss_weights, mean_weights) for part in plan]


def completions_with_tokens(batch: RolloutBatch) -> list[int]:
    """Indices of the completions with at least one response token. Empty responses are left out of updates."""
    return [completion for completion, response in enumerate(batch.response_ids) if len(response)]


def _collate(
    batch: RolloutBatch,
    completions: list[int],
    loss_weights: dict[int, FloatArray],
    mean_weights: dict[int, FloatArray],
) -> MicroBatch:
    width = max((_input_length(batch, completion) for completion in completions), default=1)
    input_ids = np.zeros((max(len(completions), 1), width), np.int64)
    hidden_rows = []
    for row, completion in enumerate(completions):
        prompt, response = batch.prompt_ids[completion // batch.group_size], batch.response_ids[completion]
        input_ids[row, : len(prompt)] = prompt
        input_ids[row, len(prompt) : len(prompt) + len(response) - 1] = response[:-1]
        first = row * width + len(prompt) - 1
        hidden_rows.append(np.arange(first, first + len(response)))
    logprobs = _joined([batch.rollout_logprobs[completion] for completion in completions], np.float32)
    response_lengths = [len(batch.response_ids[completion]) for completion in completions]
    return MicroBatch(
        completions=completions,
        response_lengths=response_lengths,
        input_ids=input_ids,
        hidden_rows=_joined(hidden_rows, np.int64),
        targets=_joined([batch.response_ids[completion] for completion in completions], np.int64),
        advantages=np.repeat(batch.advantages[completions], response_lengths).astype(np.float32),
        rollout_logprobs=np.where(np.isfinite(logprobs), logprobs, 0.0).astype(np.float32),
        loss_weights=_joined([loss_weights[completion] for completion in completions], np.float32),
        mean_weights=_joined([mean_weights[completion] for completion in completions], np.float32),
    )


def _input_length(batch: RolloutBatch, completion: int) -> int:
    prompt, response = batch.prompt_ids[completion // batch.group_size], batch.response_ids[completion]
    if not len(prompt):
        raise ValueError(f"expected a prompt of at least one token for completion {completion}, found none")
    return len(prompt) + len(response) - 1


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: type[Number]) -> npt.NDArray[Number]:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)


def plan_micro_batches(lengths: Sequence[int], ranks: int, budget_tokens: int) -> list[list[list[int]]]:
    """Indices of the sequences of each micro-batch: `plan[rank][micro_batch]`.

    `lengths`: tokens of each sequence. A micro-batch of n sequences has n × (longest of them) ≤ `budget_tokens` tokens,
    padding included. A sequence longer than the budget gets its own. Every rank gets the same number of micro-batches,
    at least one, since each has collectives; empty ones fill up. The longest come first, so that a step that does not
    fit into memory fails early.
    """
    packed = [_pack(share, lengths, budget_tokens) for share in _deal(lengths, ranks)]
    count = max(1, *(len(micro_batches) for micro_batches in packed))
    return [micro_batches + [[] for _ in range(count - len(micro_batches))] for micro_batches in packed]


def split_updates(completions: Sequence[int], updates: int) -> list[list[int]]:
    """Split `completions` in order into `updates` parts, one per optimizer step. Sizes differ by at most one."""
    return [part.tolist() for part in np.array_split(np.asarray(completions, np.int64), updates)]


def _deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal the sequences to the ranks by decreasing length, back and forth, so that all get about the same tokens."""
    order = sorted(range(len(lengths)), key=lambda sequence: (-lengths[sequence], sequence))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for place, sequence in enumerate(order):
        turn, seat = divmod(place, ranks)
        shares[seat if turn % 2 == 0 else ranks - 1 - seat].append(sequence)
    return shares


def _pack(share: Sequence[int], lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Fill micro-batches one after the other. `share` has decreasing lengths: the first of each is its longest."""
    micro_batches: list[list[int]] = []
    for sequence in share:
        if micro_batches and (len(micro_batches[-1]) + 1) * lengths[micro_batches[-1][0]] <= budget_tokens:
            micro_batches[-1].append(sequence)
        else:
            micro_batches.append([sequence])
    return micro_batches


def token_weights(rollout_logprobs: Sequence[FloatArray], aggregation: Aggregation) -> list[FloatArray]:
    """Weight of each token, parallel to `rollout_logprobs`. The weights of a batch sum to 1.

    A token whose log-probability from the engine is not finite is dropped: its weight is 0, and it is not counted.
    `token-mean`: every remaining token gets 1 / tokens of the batch (DAPO, arXiv 2503.14476 eq. 12). `sequence-mean`:
    every completion with a token gets 1 / completions, divided equally among its tokens (GRPO, arXiv 2402.03300 eq. 3).
    """
    lengths = np.array([len(logprobs) for logprobs in rollout_logprobs], np.int64)
    completion = np.repeat(np.arange(len(lengths)), lengths)
    kept = np.isfinite(np.concatenate([*rollout_logprobs, np.zeros(0, np.float32)]))
    counts = np.bincount(completion, kept, len(lengths))
    if aggregation == "token-mean":
        per_token = np.full(len(lengths), 1.0 / max(counts.sum(), 1))
    else:
        per_token = 1.0 / (np.maximum(counts, 1) * max((counts > 0).sum(), 1))
    weights = (kept * per_token[completion]).astype(np.float32)
    return np.split(weights, np.cumsum(lengths)[:-1]) if len(lengths) else []


def dropped_tokens(rollout_logprobs: Sequence[FloatArray]) -> int:
    """Number of tokens with weight 0, because the engine's log-probability is not finite."""
    return sum(int((~np.isfinite(logprobs)).sum()) for logprobs in rollout_logprobs)
