"""What each token counts in the loss of a batch.

The weights are fixed from the whole batch before its first micro-batch. The loss of any part of the batch is then a
plain weighted sum, and the parts add up to the loss of one large batch, however they are cut over micro-batches and
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rljob_trainer.algorithm.loss_config import Aggregation
from rljob_trainer.rollout_batch import FloatArray


def token_weights(rollout_logprobs: Sequence[FloatArray], aggregation: Aggregation) -> list[FloatArray]:
    """Weight of each token of each completion of a batch; parallel to `rollout_logprobs`, summing to 1 over the batch.

    A token whose log-probability from the engine is not finite is dropped: it weighs 0 and is in no denominator.
    `token-mean`: every remaining token 1 / tokens of the batch (DAPO, arXiv 2503.14476 eq. 12). `sequence-mean`: every
    completion that has a token 1 / completions, shared evenly by its tokens (GRPO, arXiv 2402.03300 eq. 3).
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
    """Number of tokens that count nothing, since the engine gave no finite log-probability for them."""
    return sum(int((~np.isfinite(logprobs)).sum()) for logprobs in rollout_logprobs)
