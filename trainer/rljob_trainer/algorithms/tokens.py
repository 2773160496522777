"""The argument of a loss function: the response tokens of a micro-batch, with the response of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rljob_api.algorithms import AlgorithmSettings


@dataclass(frozen=True, slots=True)
class Tokens:
    """The T tokens of whole responses, one response after another. Tensors are of [T], on one device; log-probabilities
    are natural, float32. A micro-batch may have no token.
    """

    logprobs: Tensor
    """Log-probabilities under the current policy, with gradient."""

    old_logprobs: Tensor
    """The same under the policy before the first update of the step; in that update, `logprobs` without gradient."""

    rollout_logprobs: Tensor
    """The same, as the engine computed them."""

    advantages: Tensor
    """Advantage of the token's response."""

    kept: Tensor
    """bool. False: the loss of the token is not counted."""

    sequence: Tensor
    """int64. Number of the token's response in the micro-batch, from 0."""

    lengths: list[int]
    """Tokens of each response; T in total."""

    def sequence_sums(self, values: Tensor) -> Tensor:
        """[T] For each token, the sum of `values`, [T], over the kept tokens of its response. Keeps gradients."""
        # Not by `sequence`: index_add on a GPU has no fixed order, and so no reproducible sum.
        parts = torch.where(self.kept, values, 0.0).split(self.lengths) if self.lengths else ()
        return torch.cat([part.sum().expand(len(part)) for part in parts]) if parts else values

    def sequence_means(self, values: Tensor) -> Tensor:
        """[T] The same for means; 0 if no token of the response is kept."""
        counts = self.sequence_sums(torch.ones_like(values))
        return self.sequence_sums(values) / counts.clamp(min=1)


LossResult = Tensor | tuple[Tensor, dict[str, Tensor]]
"""The loss of each token, [T] with gradient, which is minimized; and metrics of [T] by name, of which the mean over
tokens is logged. The names are the same in every call."""

LossFunction = Callable[[Tokens, AlgorithmSettings], LossResult]

MAX_LOG_RATIO = 20.0


def ratio_of(log_ratio: Tensor) -> Tensor:
    """The exponential, bounded so that it is finite."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
