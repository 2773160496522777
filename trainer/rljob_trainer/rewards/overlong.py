"""DAPO's penalty for long responses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rljob_trainer.rollout_batch import FloatArray


def overlong_penalty(lengths: Sequence[int], max_tokens: int, buffer_tokens: int, factor: float = 1.0) -> FloatArray:
    """[completions], float32, from -factor to 0: the number to add to each reward.

    `lengths`: tokens of each response. 0 up to `max_tokens - buffer_tokens`, then linear to `max_tokens`.
    Source: DAPO (arXiv 2503.14476 eq. 13), with a factor as in verl.
    """
    beyond = np.asarray(lengths, np.float64) - (max_tokens - buffer_tokens)
    return np.asarray(-factor * np.clip(beyond / buffer_tokens, 0.0, 1.0), np.float32)
