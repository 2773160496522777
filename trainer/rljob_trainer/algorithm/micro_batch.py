"""Micro-batches: completions packed end to end, or padded on the right, with the weight of each token in the loss."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rljob_api.algorithm import AlgorithmSpec
from rljob_api.algorithms import LossAggregation
from rljob_trainer.rollout_batch import FloatArray, RolloutBatch

_SHORTEST = 2
"""torch.compile would compile the layers once more for sequences of one token, and for one row."""

_REHEARSED_TOKENS = 1024
"""Largest length of a response in a rehearsal, which is odd: the compiler takes equal sizes for the same, and would
compile again for a length that is not the model's width."""

_MICRO_BATCH_COST = 32
"""Divisor of the token budget: the fixed cost of a micro-batch, in tokens. An estimate."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B completions with T response tokens in total. All tensors of [T] are parallel, completion after completion:
    int64 indices, float32 values.

    An empty micro-batch (B = 0) has T = 0 and two padding tokens in each of two rows, or in its only row if it is
    packed, so that a rank without completions still joins the collectives.
    """

    completions: list[int]
    """[B] Indices in the batch."""

    response_lengths: list[int]
    """[B] Tokens of each response; T in total."""

    longest: int
    """Tokens of the longest sequence, or more, if `input_ids` is packed: a power of two, since the layers might be
    compiled for each value."""

    bounds: Tensor | None
    """[sequences + 1] First token of each sequence of `input_ids`, and L, int32, if they are packed into one row. None:
    rows that are padded."""

    position_ids: Tensor | None
    """[1, L] Position of each token in its sequence, if they are packed."""

    input_ids: Tensor
    """[B, L ≥ 2] Prompt and response, without the last response token, from which nothing is predicted."""

    hidden_rows: Tensor
    """[T] Row of the flattened [B × L] hidden states that predicts the token."""

    targets: Tensor
    """[T] The response tokens."""

    sequence: Tensor
    """[T] Place of the token's completion in `completions`."""

    advantages: Tensor
    """[T]"""

    rollout_logprobs: Tensor
    """[T] Of the engine; 0 if its value is not finite."""

    loss_weights: Tensor
    """[T] Weight in the loss."""

    mean_weights: Tensor
    """[T] Weight in a mean over the tokens that the update processes."""

    def to(self, device: torch.device) -> Self:
        """This micro-batch, with its tensors on `device`.

        They are copied from pinned memory: other copies would wait for all kernels before them, and the device for the
        next ones. Each has memory of its own: for views of one buffer, the compiler would compile for each offset.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        on_device: dict[str, Any] = {
            name: (value.pin_memory() if device.type == "cuda" else value).to(device, non_blocking=True)
            for name, value in values.items()
            if isinstance(value, Tensor)
        }
        return replace(self, **on_device)


def micro_batches_of(
    batch: RolloutBatch,
    completions: Sequence[int],
    *,
    rank: int,
    ranks: int,
    budget_tokens: int,
    aggregation: LossAggregation,
    max_response_tokens: int | None = None,
    processed: Sequence[int] | None = None,
    packed: bool = False,
) -> Iterator[MicroBatch]:
    """This rank's micro-batches of one update over `completions` of a scored batch. All ranks have the same number.
    Each is built when it is asked for, while the device works on the one before.

    `processed`: the part of `completions` that is in the micro-batches (see `with_gradient`); None: all. The loss is
    normalized over all `completions`, so the gradient does not depend on `processed`; means are normalized over
    `processed`. `packed`: put the sequences of a micro-batch into one row, end to end, instead of padding them.
    `max_response_tokens`: see `token_weights`.
    """
    logprobs = [batch.rollout_logprobs[completion] for completion in completions]
    loss_weights = dict(zip(completions, token_weights(logprobs, aggregation, max_response_tokens), strict=True))
    chosen = completions if processed is None else processed
    of_chosen = [batch.rollout_logprobs[completion] for completion in chosen]
    mean_weights = dict(zip(chosen, token_weights(of_chosen, "TokenMean"), strict=True))
    lengths = [_input_length(batch, completion) for completion in chosen]
    plan = plan_micro_batches(lengths, ranks, budget_tokens, packed=packed)[rank]
    return (_collate(batch, [chosen[place] for place in part], loss_weights, mean_weights, packed) for part in plan)


def rehearsal(budget_tokens: int, *, packed: bool) -> MicroBatch:
    """A micro-batch of two or more responses of equal length, about as large as the budget. All tokens are 0."""
    length = min(max(budget_tokens // 2, _SHORTEST), _REHEARSED_TOKENS) | 1
    completions = max(budget_tokens // length, 2)
    batch = RolloutBatch(
        step=0,
        group_size=completions,
        prompt_ids=[np.zeros(1, np.int32)],
        response_ids=[np.zeros(length, np.int32)] * completions,
        rollout_logprobs=[np.zeros(length, np.float32)] * completions,
        finished=np.zeros(completions, np.bool_),
        rewards=np.zeros(completions, np.float32),
        advantages=np.ones(completions, np.float32),
    )
    places = range(completions)
    [micro_batch] = micro_batches_of(
        batch, places, rank=0, ranks=1, budget_tokens=completions * length, aggregation="TokenMean", packed=packed
    )
    return micro_batch


def completions_with_tokens(batch: RolloutBatch) -> list[int]:
    """Indices of the completions that updates process: those that take part and have at least one response token."""
    kept = batch.takes_part
    return [completion for completion, response in enumerate(batch.response_ids) if len(response) and kept[completion]]


def with_gradient(batch: RolloutBatch, completions: Sequence[int], algorithm: AlgorithmSpec) -> list[int]:
    """The `completions` that contribute to the gradient of a scored batch.

    Without a KL or entropy term, the loss of a completion is a multiple of its advantage: if that is 0, as in a group
    with equal rewards, its gradient is 0 as well. If none contributes, the first is kept, so that there are metrics. A
    loss of the user may have any gradient.
    """
    if algorithm.kl_coefficient or algorithm.entropy_coefficient or algorithm.loss is not None:
        return list(completions)
    return [completion for completion in completions if batch.advantages[completion]] or list(completions[:1])


def _collate(
    batch: RolloutBatch,
    completions: list[int],
    loss_weights: dict[int, FloatArray],
    mean_weights: dict[int, FloatArray],
    packed: bool,
) -> MicroBatch:
    lengths = [_input_length(batch, completion) for completion in completions]
    if packed:
        padding = max(_SHORTEST - sum(lengths), 0)
        packed_lengths = [*lengths, *([padding] if padding else [])]
        bounds = np.cumsum([0, *packed_lengths], dtype=np.int32)
        starts, flat = bounds.tolist(), np.zeros(sum(packed_lengths), np.int64)
        positions = np.concatenate([np.arange(length) for length in packed_lengths])
        packing: dict[str, Any] = {
            "longest": 1 << (max(packed_lengths) - 1).bit_length(),
            "bounds": torch.from_numpy(bounds),
            "position_ids": torch.from_numpy(positions[None]),
        }
    else:
        packing = {"longest": 0, "bounds": None, "position_ids": None}
        width = max([_SHORTEST, *lengths])
        rows = len(completions) or _SHORTEST
        starts, flat = [row * width for row in range(rows)], np.zeros(rows * width, np.int64)
    hidden_rows = []
    for start, completion in zip(starts, completions, strict=False):
        prompt, response = batch.prompt_ids[completion // batch.group_size], batch.response_ids[completion]
        predicting = start + len(prompt) - 1
        flat[start : start + len(prompt)] = prompt
        flat[predicting + 1 : predicting + len(response)] = response[:-1]
        hidden_rows.append(np.arange(predicting, predicting + len(response)))
    logprobs = _joined([batch.rollout_logprobs[completion] for completion in completions], np.float32)
    response_lengths = [len(batch.response_ids[completion]) for completion in completions]
    return MicroBatch(
        completions=completions,
        response_lengths=response_lengths,
        **packing,
        input_ids=torch.from_numpy(flat[None] if packed else flat.reshape(-1, width)),
        hidden_rows=_joined(hidden_rows, np.int64),
        targets=_joined([batch.response_ids[completion] for completion in completions], np.int64),
        sequence=torch.from_numpy(np.repeat(np.arange(len(completions)), response_lengths).astype(np.int64)),
        advantages=torch.from_numpy(np.repeat(batch.advantages[completions], response_lengths).astype(np.float32)),
        rollout_logprobs=torch.where(logprobs.isfinite(), logprobs, 0.0),
        loss_weights=_joined([loss_weights[completion] for completion in completions], np.float32),
        mean_weights=_joined([mean_weights[completion] for completion in completions], np.float32),
    )


def _input_length(batch: RolloutBatch, completion: int) -> int:
    prompt, response = batch.prompt_ids[completion // batch.group_size], batch.response_ids[completion]
    if not len(prompt):
        raise ValueError(f"expected a prompt of at least one token for completion {completion}, found none")
    return len(prompt) + len(response) - 1


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: type[np.int64 | np.float32]) -> Tensor:
    """`parts`, end to end: [sum of their lengths] of `dtype`."""
    return torch.from_numpy(np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype))


def plan_micro_batches(
    lengths: Sequence[int], ranks: int, budget_tokens: int, *, packed: bool = False
) -> list[list[list[int]]]:
    """Indices of the sequences of each micro-batch: `plan[rank][micro_batch]`.

    `lengths`: tokens of each sequence. A micro-batch of n sequences has n × (longest of them) ≤ `budget_tokens` tokens,
    padding included; if it is `packed`, the sum of their lengths. A sequence longer than the budget gets its own. Every
    rank gets the same number of micro-batches, at least one, because each has collectives; ranks with fewer get empty
    ones. The longest come first, so that a step that does not fit in memory fails early.
    """
    divide = _balance if packed else _divide
    of_ranks = [divide(share, lengths, budget_tokens) for share in _deal(lengths, ranks)]
    count = max(1, *(len(micro_batches) for micro_batches in of_ranks))
    return [micro_batches + [[] for _ in range(count - len(micro_batches))] for micro_batches in of_ranks]


def split_updates(completions: Sequence[int], updates: int) -> list[list[int]]:
    """Split `completions` in order into `updates` parts, one per optimizer step. Sizes differ by at most one."""
    return [part.tolist() for part in np.array_split(np.asarray(completions, np.int64), updates)]


def _deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal the sequences to the ranks by decreasing length, back and forth, so that all get about the same number of
    tokens."""
    order = sorted(range(len(lengths)), key=lambda sequence: (-lengths[sequence], sequence))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for place, sequence in enumerate(order):
        turn, seat = divmod(place, ranks)
        shares[seat if turn % 2 == 0 else ranks - 1 - seat].append(sequence)
    return shares


def _balance(share: Sequence[int], lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Divide `share`, which has decreasing lengths, into few micro-batches with about the same number of tokens.

    Each sequence goes to the micro-batch with the fewest tokens so far.
    """
    least = -(-sum(lengths[sequence] for sequence in share) // budget_tokens)
    for count in range(least, len(share) + 1):
        micro_batches: list[list[int]] = [[] for _ in range(count)]
        filled = [(0, place) for place in range(count)]
        for sequence in share:
            tokens, place = heapq.heappop(filled)
            micro_batches[place].append(sequence)
            heapq.heappush(filled, (tokens + lengths[sequence], place))
        if all(tokens <= budget_tokens or len(micro_batches[place]) == 1 for tokens, place in filled):
            return micro_batches
    return [[sequence] for sequence in share]


def _divide(share: Sequence[int], lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Divide `share`, which has decreasing lengths, into micro-batches with little padding.

    Of all divisions in order, this is the one with the fewest tokens, padding included, where each micro-batch counts
    as a few tokens more for its launches and collectives. One with a single sequence counts as a full one more if two
    of that length would fit, since torch.compile compiles the layers once more for one row (16 s on an H200). Of equal
    divisions, it is the most even one. Dynamic programming over the number of sequences divided.
    """
    of_share = np.asarray([lengths[sequence] for sequence in share], np.int64)
    fixed = max(budget_tokens // _MICRO_BATCH_COST, 1)
    cost = np.zeros(len(share) + 1, np.int64)
    unevenness = np.zeros(len(share) + 1)
    starts = np.zeros(len(share) + 1, np.int64)
    for stop in range(1, len(share) + 1):
        tokens = np.arange(stop, 0, -1) * of_share[:stop]
        allowed = tokens <= budget_tokens
        allowed[stop - 1] = True  # a single sequence, of any length
        total = np.where(allowed, cost[:stop] + tokens + fixed, np.iinfo(np.int64).max)
        if 2 * of_share[stop - 1] <= budget_tokens:
            total[stop - 1] += budget_tokens
        uneven = np.where(total == total.min(), unevenness[:stop] + np.square(tokens, dtype=np.float64), np.inf)
        starts[stop] = start = uneven.argmin()
        cost[stop], unevenness[stop] = total[start], uneven[start]
    micro_batches: list[list[int]] = []
    stop = len(share)
    while stop:
        micro_batches.append(list(share[starts[stop] : stop]))
        stop = int(starts[stop])
    return micro_batches[::-1]


def token_weights(
    rollout_logprobs: Sequence[FloatArray], aggregation: LossAggregation, max_response_tokens: int | None = None
) -> list[FloatArray]:
    """Weight of each token, float32, parallel to `rollout_logprobs`: [tokens] of each completion. Those of the means
    sum to 1.

    A token whose log-probability from the engine is not finite is dropped: its weight is 0, and it is not counted.
    `TokenMean`: every remaining token gets 1 / tokens of the batch (DAPO, arXiv 2503.14476 eq. 12). `SequenceMean`:
    every completion with a token gets 1 / completions, divided equally among its tokens (GRPO, arXiv 2402.03300 eq. 3).
    `ConstantLength`: every token gets 1 / (completions × `max_response_tokens`) (Dr. GRPO, arXiv 2503.20783).
    """
    lengths = np.array([len(logprobs) for logprobs in rollout_logprobs], np.int64)
    completion = np.repeat(np.arange(len(lengths)), lengths)
    kept = np.isfinite(np.concatenate([*rollout_logprobs, np.zeros(0, np.float32)]))
    counts = np.bincount(completion, kept, len(lengths))
    completions = max((counts > 0).sum(), 1)
    if aggregation == "TokenMean":
        per_token = np.full(len(lengths), 1.0 / max(counts.sum(), 1))
    elif aggregation == "SequenceMean":
        per_token = 1.0 / (np.maximum(counts, 1) * completions)
    else:
        if max_response_tokens is None:
            raise ValueError("expected max_response_tokens for ConstantLength, found None")
        per_token = np.full(len(lengths), 1.0 / (completions * max_response_tokens))
    weights = (kept * per_token[completion]).astype(np.float32)
    return np.split(weights, np.cumsum(lengths)[:-1]) if len(lengths) else []


def dropped_tokens(rollout_logprobs: Sequence[FloatArray]) -> int:
    """Number of tokens with weight 0: the engine's log-probability, [tokens] of each completion, is not finite."""
    return sum(int((~np.isfinite(logprobs)).sum()) for logprobs in rollout_logprobs)
