"""The objective of an update: the loss of the algorithm, corrected for the mismatch between engine and policy, plus KL
divergence and entropy.

Tokens are summed with weights that are computed from the whole batch (see `micro_batch.token_weights`), so that the
losses and metrics of all micro-batches on all ranks add up to those of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rljob_api.algorithm import AlgorithmSpec, ImportanceSamplingSpec
from rljob_trainer.algorithm.micro_batch import MicroBatch
from rljob_trainer.algorithms.tokens import MAX_LOG_RATIO, LossFunction, Tokens, ratio_of

_MAX_KL = 10.0
_SQUARES = "importance_weight_squares"


@dataclass(frozen=True, slots=True)
class LossMetrics:
    """Detached scalars, for one part of a batch."""

    sums: dict[str, Tensor]
    """Metrics whose total over a batch is the sum over its parts."""

    maxima: dict[str, Tensor]
    """Metrics whose total over a batch is the maximum over its parts."""


def policy_loss(
    micro_batch: MicroBatch,
    logprobs: Tensor,
    entropy: Tensor,
    algorithm: AlgorithmSpec,
    loss_function: LossFunction,
    *,
    old_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
) -> tuple[Tensor, LossMetrics]:
    """This part's share of the loss of the batch, a scalar with gradient, and its metrics.

    `Σ loss_weight · (is_weight · loss + kl_coefficient · k3 − entropy_coefficient · entropy)`.

    `logprobs`, `entropy`: [T] of the current policy, with gradient. `old_logprobs`: [T] of the policy before the step's
    first update; None: that is the current policy. `reference_logprobs`: [T] of the initial model; None without a KL
    term. `micro_batch` is on the device of `logprobs`.

    Sources: k3 (http://joschu.net/blog/kl-approx.html), truncated importance sampling between engine and policy (as
    verl's `rollout_is`), masked (as IcePop).
    """
    tokens = Tokens(
        logprobs,
        logprobs.detach() if old_logprobs is None else old_logprobs,
        micro_batch.rollout_logprobs,
        micro_batch.advantages,
        micro_batch.mean_weights > 0,
        micro_batch.sequence,
        micro_batch.response_lengths,
    )
    result = loss_function(tokens, algorithm.settings)
    objective, metrics = result if isinstance(result, tuple) else (result, {})
    is_weights = importance_weights(tokens, algorithm.importance_sampling)
    objective = is_weights * objective
    if algorithm.entropy_coefficient:
        objective = objective - algorithm.entropy_coefficient * entropy
    if reference_logprobs is not None:
        kl = k3_divergence(logprobs, reference_logprobs)
        metrics = metrics | {"kl": kl}
        objective = objective + algorithm.kl_coefficient * kl
    loss = (micro_batch.loss_weights * objective).sum()

    mismatch = (tokens.old_logprobs - tokens.rollout_logprobs).abs()
    metrics = metrics | {
        "ppo_kl": tokens.old_logprobs - logprobs,
        "entropy": entropy,
        "importance_weight_mean": is_weights,
        _SQUARES: is_weights.square(),
        "logprob_diff_mean": mismatch,
    }
    sums = {name: _mean(value, micro_batch.mean_weights) for name, value in metrics.items()}
    maxima = {"importance_weight_max": is_weights, "logprob_diff_max": mismatch}
    return loss, LossMetrics(
        sums={"loss": loss.detach(), **sums},
        maxima={name: _maximum(value, tokens.kept) for name, value in maxima.items()},
    )


def with_effective_sample_size(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics of a whole batch, with `importance_ess` in place of the mean square of the importance weights.

    It is the effective sample size of the weights w as a share of the n tokens, `(Σ w)² / (n Σ w²)`: 1 if they are
    equal, 1 / n if one token has all the weight, 0 if all are masked.
    """
    squares = metrics[_SQUARES]
    share = metrics["importance_weight_mean"] ** 2 / squares if squares else 0.0
    others = {name: value for name, value in metrics.items() if name != _SQUARES}
    return others | {"importance_ess": share}


def importance_weights(tokens: Tokens, sampling: ImportanceSamplingSpec) -> Tensor:
    """Weight of each token, [T] without gradient: from the ratio policy / engine before the step's first update."""
    if sampling.mode == "Disabled":
        return torch.ones_like(tokens.rollout_logprobs)
    log_ratio = tokens.old_logprobs.detach() - tokens.rollout_logprobs
    ratio = ratio_of(tokens.sequence_sums(log_ratio) if sampling.level == "Sequence" else log_ratio)
    cap = sampling.cap
    if sampling.mode == "Truncate":
        return ratio.clamp(max=cap)
    return torch.where((ratio >= 1 / cap) & (ratio <= cap), ratio, 0.0)


def k3_divergence(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Estimate of KL(policy ‖ reference) of each token, [T], never negative.

    `e^d − d − 1` with d = reference − policy.
    """
    difference = (reference_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (difference.exp() - difference - 1).clamp(max=_MAX_KL)


def _mean(values: Tensor, mean_weights: Tensor) -> Tensor:
    """The weighted sum of `values`, both of [T]; a scalar."""
    return (values.detach() * mean_weights).sum()


def _maximum(values: Tensor, kept: Tensor) -> Tensor:
    """The largest of the kept values, both of [T], a scalar. They are not negative; 0 if none is kept."""
    return torch.nn.functional.pad(values.detach() * kept, (0, 1)).amax()
