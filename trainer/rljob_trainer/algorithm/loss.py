"""The loss of GRPO: PPO's clipped objective, corrected for the mismatch between engine and policy.

All inputs are per token: float32 tensors of [T] on one device, parallel to `MicroBatch.targets`. Log-probabilities are
natural. Tokens are summed with weights that are computed from the whole batch (see `micro_batch.token_weights`), so
that the losses and metrics of all micro-batches on all ranks add up to those of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rljob_api.algorithm import AlgorithmSpec, ImportanceSamplingSpec
from rljob_trainer.algorithm.micro_batch import MicroBatch

_MAX_LOG_RATIO = 20.0
_MAX_KL = 10.0


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
    *,
    old_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
) -> tuple[Tensor, LossMetrics]:
    """This part's share of the loss of the batch, a scalar with gradient, and its metrics.

    `Σ loss_weight · (is_weight · clipped_objective + kl_coefficient · k3 − entropy_coefficient · entropy)`.

    `logprobs`, `entropy`: [T] of the current policy, with gradient. `old_logprobs`: [T] of the policy before the step's
    first update; None: that is the current policy. `reference_logprobs`: [T] of the initial model; None without a KL
    term. `micro_batch` is on the device of `logprobs`.

    Sources: clipped objective PPO (arXiv 1707.06347 eq. 7), higher upper clip DAPO (arXiv 2503.14476 §3.1), dual clip
    (arXiv 1912.09729 eq. 5), k3 (http://joschu.net/blog/kl-approx.html), truncated importance sampling between engine
    and policy (as verl's `rollout_is`), masked (as IcePop).
    """
    old_logprobs = logprobs.detach() if old_logprobs is None else old_logprobs
    surrogate, metrics = _clipped_objective(logprobs, old_logprobs, micro_batch.advantages, algorithm)
    is_weights = importance_weights(old_logprobs, micro_batch.rollout_logprobs, algorithm.importance_sampling)
    objective = is_weights * surrogate
    if algorithm.entropy_coefficient:
        objective = objective - algorithm.entropy_coefficient * entropy
    if reference_logprobs is not None:
        kl = k3_divergence(logprobs, reference_logprobs)
        metrics["kl"] = kl
        objective = objective + algorithm.kl_coefficient * kl
    loss = (micro_batch.loss_weights * objective).sum()

    mismatch = (old_logprobs - micro_batch.rollout_logprobs).abs()
    metrics |= {"entropy": entropy, "importance_weight_mean": is_weights, "logprob_diff_mean": mismatch}
    mean_weights = micro_batch.mean_weights
    kept = mean_weights > 0
    return loss, LossMetrics(
        sums={"loss": loss.detach(), **{name: _mean(value, mean_weights) for name, value in metrics.items()}},
        maxima={"importance_weight_max": _maximum(is_weights, kept), "logprob_diff_max": _maximum(mismatch, kept)},
    )


def importance_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, sampling: ImportanceSamplingSpec) -> Tensor:
    """Weight of each token, [T] without gradient: from the ratio policy / engine before the step's first update."""
    if sampling.mode == "Disabled":
        return torch.ones_like(rollout_logprobs)
    ratio = _ratio(old_logprobs.detach() - rollout_logprobs)
    cap = sampling.cap
    if sampling.mode == "Truncate":
        return ratio.clamp(max=cap)
    return torch.where((ratio >= 1 / cap) & (ratio <= cap), ratio, 0.0)


def k3_divergence(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Estimate of KL(policy ‖ reference) of each token, [T], never negative.

    `e^d − d − 1` with d = reference − policy.
    """
    difference = (reference_logprobs - logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return (difference.exp() - difference - 1).clamp(max=_MAX_KL)


def _clipped_objective(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, algorithm: AlgorithmSpec
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each token, [T] with gradient, and metrics of [T] by name. All inputs are of [T]."""
    difference = logprobs - old_logprobs
    ratio = _ratio(difference)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    objective = torch.maximum(plain, clipped)
    was_clipped = clipped > plain
    metrics = {
        "ppo_kl": -difference,
        "clip_fraction_high": was_clipped & (advantages > 0),
        "clip_fraction_low": was_clipped & (advantages < 0),
    }
    if algorithm.dual_clip:
        bound = torch.where(advantages < 0, -advantages * algorithm.dual_clip, torch.inf)
        metrics["clip_fraction_dual"] = objective > bound
        objective = torch.minimum(objective, bound)
    return objective, metrics


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _mean(values: Tensor, mean_weights: Tensor) -> Tensor:
    """The weighted sum of `values`, both of [T]; a scalar."""
    return (values.detach() * mean_weights).sum()


def _maximum(values: Tensor, kept: Tensor) -> Tensor:
    """The largest of the kept values, both of [T], a scalar. They are not negative; 0 if none is kept."""
    return torch.nn.functional.pad(values.detach() * kept, (0, 1)).amax()
