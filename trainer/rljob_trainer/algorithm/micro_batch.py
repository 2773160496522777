"""Micro-batches: completions packed end to end, or padded on the right, with the weight of each token in the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rljob_api.algorithm import AlgorithmSpec
from rljob_api.algorithms import LossAggregation
from rljob_trainer.algorithm.division import plan_micro_batches, plan_with_shared_prompts
from rljob_trainer.algorithm.packing import packing_of
from rljob_trainer.rollout_batch import FloatArray, IntArray, RolloutBatch

_SHORTEST = 2
"""torch.compile would compile the layers once more for sequences of one token, and for one row."""

_REHEARSED_TOKENS = 1024
"""Largest length of a response in a rehearsal, which is odd: the compiler takes equal sizes for the same, and would
compile again for a length that is not the model's width."""


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

    packing: dict[str, Any]
    """The result of `packing_of`, if sequences are packed into one row; empty: rows that are padded.

    If prompts are shared, they are sequences of their own, which come first; their responses continue them.
    """

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

        def on_device(values: Mapping[str, Any]) -> dict[str, Any]:
            return {
                name: (value.pin_memory() if device.type == "cuda" else value).to(device, non_blocking=True)
                for name, value in values.items()
                if isinstance(value, Tensor)
            }

        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, packing=self.packing | on_device(self.packing), **on_device(values))


def micro_batches_of(
    batch: RolloutBatch,
    completions: Sequence[int],
    *,
    rank: int,
    ranks: int,
    budget_tokens: int,
    algorithm: AlgorithmSpec,
    processed: Sequence[int] | None = None,
    normalized: bool = True,
    packed: bool = False,
    shared: bool = False,
) -> Iterator[MicroBatch]:
    """This rank's micro-batches of one update over `completions` of a scored batch. All ranks have the same number.
    Each is built when it is asked for, while the device works on the one before.

    `processed`: the part of `completions` that is in the micro-batches (see `with_gradient`); None: all. The loss is
    normalized over all `completions`, so the gradient does not depend on `processed`; means are normalized over
    `processed`. `normalized` False: by nothing, since the whole step is not known yet (`loss_normalizer`).
    `packed`: put the sequences of a micro-batch into one row, end to end, instead of padding them. `shared`: they may
    have their prompt in common, if that saves tokens.
    """
    chosen = completions if processed is None else processed
    logprobs, of_chosen = ([batch.rollout_logprobs[each] for each in part] for part in (completions, chosen))
    by, by_means = 1, 1
    if normalized:
        by, by_means = loss_normalizer(logprobs, algorithm), kept_tokens(of_chosen)
    of_loss = token_weights(logprobs, algorithm.settings.loss_aggregation, by)
    loss_weights = dict(zip(completions, of_loss, strict=True))
    mean_weights = dict(zip(chosen, token_weights(of_chosen, "TokenMean", by_means), strict=True))
    lengths = [_input_length(batch, completion) for completion in chosen]
    if packed and shared:
        groups = [completion // batch.group_size for completion in chosen]
        prompts = [len(batch.prompt_ids[group]) for group in groups]
        division, shared = plan_with_shared_prompts(lengths, prompts, groups, ranks, budget_tokens)
    else:
        division, shared = plan_micro_batches(lengths, ranks, budget_tokens, packed=packed), False
    return (
        _collate(batch, [chosen[place] for place in part], loss_weights, mean_weights, packed, shared)
        for part in division[rank]
    )


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
    any_algorithm = AlgorithmSpec(steps=1)
    [micro_batch] = micro_batches_of(
        batch, places, rank=0, ranks=1, budget_tokens=completions * length, algorithm=any_algorithm, packed=packed
    )
    return micro_batch


def completions_with_tokens(batch: RolloutBatch) -> list[int]:
    """Indices of the completions that updates process: those that take part and have at least one response token."""
    kept = batch.takes_part
    return [completion for completion, response in enumerate(batch.response_ids) if len(response) and kept[completion]]


def contributing(batch: RolloutBatch, completions: Sequence[int], algorithm: AlgorithmSpec) -> list[int]:
    """The `completions` that contribute to the gradient of a scored batch.

    Without a KL or entropy term, the loss of a completion is a multiple of its advantage: if that is 0, as in a group
    with equal rewards, its gradient is 0 as well. A loss of the user may have any gradient.
    """
    if algorithm.kl_coefficient or algorithm.entropy_coefficient or algorithm.loss is not None:
        return list(completions)
    return [completion for completion in completions if batch.advantages[completion]]


def with_gradient(batch: RolloutBatch, completions: Sequence[int], algorithm: AlgorithmSpec) -> list[int]:
    """The same. If none contributes, the first is kept, so that there are metrics."""
    return contributing(batch, completions, algorithm) or list(completions[:1])


def _collate(
    batch: RolloutBatch,
    completions: list[int],
    loss_weights: dict[int, FloatArray],
    mean_weights: dict[int, FloatArray],
    packed: bool,
    shared: bool,
) -> MicroBatch:
    continued: list[int] = []
    packing: dict[str, Any] = {}
    if shared:
        completions, sequences, hidden_rows, continued = _with_shared_prompts(batch, completions)
    else:
        prompts = [batch.prompt_ids[completion // batch.group_size] for completion in completions]
        read = [batch.response_ids[completion][:-1] for completion in completions]
        sequences = [np.concatenate(each) for each in zip(prompts, read, strict=True)]
    width = max(_SHORTEST, sum(map(len, sequences)) if packed else max(map(len, sequences), default=0))
    starts = _starts(sequences) if packed else [width * row for row in range(len(sequences) or _SHORTEST)]
    input_ids = np.zeros((1 if packed else len(starts), width), np.int64)
    for start, sequence in zip(starts, sequences, strict=False):
        input_ids.reshape(-1)[start : start + len(sequence)] = sequence
    if not shared:
        hidden_rows = [
            start + np.arange(len(prompt) - 1, len(sequence))
            for start, prompt, sequence in zip(starts, prompts, sequences, strict=False)
        ]
    if packed:
        packing = packing_of([length for length in (*map(len, sequences), width - starts[-1]) if length], continued)
    logprobs = _joined([batch.rollout_logprobs[completion] for completion in completions], np.float32)
    response_lengths = [len(batch.response_ids[completion]) for completion in completions]
    return MicroBatch(
        completions=completions,
        response_lengths=response_lengths,
        packing=packing,
        input_ids=torch.from_numpy(input_ids),
        hidden_rows=_joined(hidden_rows, np.int64),
        targets=_joined([batch.response_ids[completion] for completion in completions], np.int64),
        sequence=torch.from_numpy(np.repeat(np.arange(len(completions)), response_lengths).astype(np.int64)),
        advantages=torch.from_numpy(np.repeat(batch.advantages[completions], response_lengths).astype(np.float32)),
        rollout_logprobs=torch.where(logprobs.isfinite(), logprobs, 0.0),
        loss_weights=_joined([loss_weights[completion] for completion in completions], np.float32),
        mean_weights=_joined([mean_weights[completion] for completion in completions], np.float32),
    )


def _with_shared_prompts(
    batch: RolloutBatch, completions: list[int]
) -> tuple[list[int], list[IntArray], list[npt.NDArray[np.int64]], list[int]]:
    """The completions, group by group; their sequences: the prompts, then the responses without their last token, which
    may be empty; rows of the hidden states that predict each response; and `continued` of `packing_of`."""
    groups: dict[int, list[int]] = {}
    for completion in completions:
        groups.setdefault(completion // batch.group_size, []).append(completion)
    continued = {
        group: sum(len(batch.response_ids[completion]) > 1 for completion in members)
        for group, members in groups.items()
    }
    order = sorted(groups, key=lambda group: not continued[group])
    completions = [completion for group in order for completion in groups[group]]
    prompts, read = (
        [batch.prompt_ids[group] for group in order],
        [batch.response_ids[each][:-1] for each in completions],
    )
    starts = _starts([*prompts, *read])
    last_of_prompt = {group: stop - 1 for group, stop in zip(order, starts[1:], strict=False)}
    hidden_rows = [
        np.array([last_of_prompt[completion // batch.group_size], *range(start, start + len(ids))], np.int64)
        for completion, start, ids in zip(completions, starts[len(order) : -1], read, strict=True)
    ]
    return completions, [*prompts, *read], hidden_rows, [continued[group] for group in order]


def _starts(sequences: Sequence[IntArray]) -> list[int]:
    """[sequences + 1] First token of each sequence, if they stand end to end, and the number of all tokens."""
    starts: list[int] = np.cumsum([0, *map(len, sequences)]).tolist()
    return starts


def _input_length(batch: RolloutBatch, completion: int) -> int:
    prompt, response = batch.prompt_ids[completion // batch.group_size], batch.response_ids[completion]
    if not len(prompt):
        raise ValueError(f"expected a prompt of at least one token for completion {completion}, found none")
    return len(prompt) + len(response) - 1


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: type[np.int64 | np.float32]) -> Tensor:
    """`parts`, end to end: [sum of their lengths] of `dtype`."""
    return torch.from_numpy(np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype))


def split_updates(completions: Sequence[int], updates: int) -> list[list[int]]:
    """Split `completions` in order into `updates` parts, one per optimizer step. Sizes differ by at most one."""
    return [part.tolist() for part in np.array_split(np.asarray(completions, np.int64), updates)]


def loss_normalizer(rollout_logprobs: Sequence[FloatArray], algorithm: AlgorithmSpec) -> int:
    """Divisor of the loss of an update. `rollout_logprobs`: [tokens] of each of its completions.

    `TokenMean`: its tokens (DAPO, arXiv 2503.14476 eq. 12). `SequenceMean`: its completions with a token (GRPO, arXiv
    2402.03300 eq. 3). `ConstantLength`: these × `maxResponseTokens` (Dr. GRPO, arXiv 2503.20783). Tokens whose
    log-probability from the engine is not finite are dropped, and not counted.
    """
    aggregation = algorithm.settings.loss_aggregation
    if aggregation == "TokenMean":
        return kept_tokens(rollout_logprobs)
    completions = max(sum(bool(np.isfinite(logprobs).any()) for logprobs in rollout_logprobs), 1)
    return completions if aggregation == "SequenceMean" else completions * algorithm.max_response_tokens


def token_weights(
    rollout_logprobs: Sequence[FloatArray], aggregation: LossAggregation, normalizer: int
) -> list[FloatArray]:
    """Weight of each token, float32, parallel to `rollout_logprobs`: [tokens] of each completion. Those of the means
    sum to 1 if they are divided by the `loss_normalizer`.

    The weight of a dropped token is 0. With `SequenceMean`, the tokens of a completion share a weight of 1 /
    `normalizer`; otherwise, each has it.
    """
    lengths = np.array([len(logprobs) for logprobs in rollout_logprobs], np.int64)
    completion = np.repeat(np.arange(len(lengths)), lengths)
    kept = np.isfinite(np.concatenate([*rollout_logprobs, np.zeros(0, np.float32)]))
    counts = np.bincount(completion, kept, len(lengths))
    sharing = np.maximum(counts, 1) if aggregation == "SequenceMean" else np.ones(len(lengths))
    weights = (kept * (1.0 / (sharing * normalizer))[completion]).astype(np.float32)
    return np.split(weights, np.cumsum(lengths)[:-1]) if len(lengths) else []


def kept_tokens(rollout_logprobs: Sequence[FloatArray]) -> int:
    """Number of tokens that are not dropped, at least 1. `rollout_logprobs`: [tokens] of each completion."""
    return max(sum(map(len, rollout_logprobs)) - dropped_tokens(rollout_logprobs), 1)


def dropped_tokens(rollout_logprobs: Sequence[FloatArray]) -> int:
    """Number of tokens with weight 0: the engine's log-probability, [tokens] of each completion, is not finite."""
    return sum(int((~np.isfinite(logprobs)).sum()) for logprobs in rollout_logprobs)
