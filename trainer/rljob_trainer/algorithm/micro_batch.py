"""The arrays of one micro-batch: completions side by side, padded on the right, and what the loss needs of each
token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from rljob_trainer.algorithm.aggregation import token_weights
from rljob_trainer.algorithm.batching import plan_micro_batches
from rljob_trainer.algorithm.loss_config import Aggregation
from rljob_trainer.rollout_batch import FloatArray, RolloutBatch

IndexArray = npt.NDArray[np.int64]
Number = TypeVar("Number", np.int64, np.float32)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B completions with T response tokens in all. All arrays of [T] are parallel, completion after completion.

    `completions`: [B] places in the batch. `response_lengths`: [B], T in sum. `input_ids`: [B, L] prompt and response;
    the last response token is left out, since nothing is predicted from it. `hidden_rows`: [T] row of the [B × L]
    hidden states that predicts the token. `targets`: [T] the response tokens. `rollout_logprobs`: [T], 0 where the
    engine gave none that is finite. `loss_weights`, `mean_weights`: [T] what the token counts in the loss, and in a
    mean over the tokens of the batch. An empty micro-batch (B = 0) has T = 0 and one row of one padding token: ranks
    without a share still take part.
    """

    completions: list[int]
    response_lengths: list[int]
    input_ids: IndexArray
    hidden_rows: IndexArray
    targets: IndexArray
    advantages: FloatArray
    rollout_logprobs: FloatArray
    loss_weights: FloatArray
    mean_weights: FloatArray

    def by_completion(self, values: FloatArray) -> Iterator[tuple[int, FloatArray]]:
        """`values` of [T] cut up: each completion's place in the batch and its own."""
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
    """This rank's micro-batches of one update over `completions` of a scored batch; as many as every other rank has.

    The weights are over all of `completions`, so the micro-batches of all ranks add up to the whole.
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
    """The completions that have a response token: an empty response takes no part in an update."""
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
