"""The loss of GRPO: PPO's clipped objective, corrected for the mismatch between engine and policy.

All inputs are per token. They are summed with weights that are computed from the whole batch (see
`micro_batch.token_weights`), so that the losses and metrics of all micro-batches on all ranks add up to those of the
batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rljob_trainer.algorithm.loss_config import LossConfig

_MAX_LOG_RATIO = 20.0
_MAX_KL = 10.0


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Inputs of the loss for T response tokens: float32 tensors of [T]. Log-probabilities are natural."""

    logprobs: Tensor
    """Of the current policy, with gradient."""

    entropy: Tensor
    """Of the current policy, with gradient."""

    old_logprobs: Tensor
    """Of the policy before the step's first update."""

    rollout_logprobs: Tensor
    """Of the engine."""

    advantages: Tensor

    loss_weights: Tensor
    """Weight of the token in the loss; 0 drops it."""

    mean_weights: Tensor
    """Weight of the token in a mean over the batch; 0 drops it."""

    reference_logprobs: Tensor | None = None
    """Of the initial model; None without a KL term."""


@dataclass(frozen=True, slots=True)
class LossMetrics:
    """Detached scalars, for one part of a batch."""

    sums: dict[str, Tensor]
    """Metrics whose total over a batch is the sum over its parts."""

    maxima: dict[str, Tensor]
    """Metrics whose total over a batch is the maximum over its parts."""


def policy_loss(tokens: TokenValues, config: LossConfig) -> tuple[Tensor, LossMetrics]:
    """This part's share of the loss of the batch, a scalar with gradient, and its metrics.

    `Σ loss_weight · (is_weight · clipped_objective + kl_coefficient · k3 − entropy_coefficient · entropy)`.

    Sources: clipped objective PPO (arXiv 1707.06347 eq. 7), higher upper clip DAPO (arXiv 2503.14476 §3.1), dual clip
    (arXiv 1912.09729 eq. 5), k3 (http://joschu.net/blog/kl-approx.html), truncated importance sampling between engine
    and policy (as verl's `rollout_is`), masked (as IcePop).
    """
    surrogate, metrics = _clipped_objective(tokens, config)
    is_weights = importance_weights(tokens.old_logprobs, tokens.rollout_logprobs, config)
    objective = is_weights * surrogate
    if config.entropy_coefficient:
        objective = objective - config.entropy_coefficient * tokens.entropy
    if tokens.reference_logprobs is not None:
        kl = k3_divergence(tokens.logprobs, tokens.reference_logprobs)
        metrics["kl"] = kl
        objective = objective + config.kl_coefficient * kl
    loss = (tokens.loss_weights * objective).sum()

    mismatch = (tokens.old_logprobs - tokens.rollout_logprobs).abs()
    metrics |= {"entropy": tokens.entropy, "importance_weight_mean": is_weights, "logprob_diff_mean": mismatch}
    kept = tokens.mean_weights > 0
    return loss, LossMetrics(
        sums={"loss": loss.detach(), **{name: _mean(value, tokens.mean_weights) for name, value in metrics.items()}},
        maxima={"importance_weight_max": _maximum(is_weights, kept), "logprob_diff_max": _maximum(mismatch, kept)},
    )


def importance_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, config: LossConfig) -> Tensor:
    """Weight of each token, [T] without gradient: from the ratio policy / engine before the step's first update."""
    if config.importance_sampling == "off":
        return torch.ones_like(rollout_logprobs)
    ratio = _ratio(old_logprobs.detach() - rollout_logprobs)
    cap = config.importance_sampling_cap
    if config.importance_sampling == "truncate":
        return ratio.clamp(max=cap)
    return torch.where((ratio >= 1 / cap) & (ratio <= cap), ratio, 0.0)


def k3_divergence(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Per-token estimate of KL(policy ‖ reference), never negative: `e^d − d − 1` with d = reference − policy."""
    difference = (reference_logprobs - logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return (difference.exp() - difference - 1).clamp(max=_MAX_KL)


def _clipped_objective(tokens: TokenValues, config: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    difference = tokens.logprobs - tokens.old_logprobs
    ratio, advantages = _ratio(difference), tokens.advantages
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    objective = torch.maximum(plain, clipped)
    was_clipped = clipped > plain
    metrics = {
        "ppo_kl": -difference,
        "clip_fraction_high": was_clipped & (advantages > 0),
        "clip_fraction_low": was_clipped & (advantages < 0),
    }
    if config.dual_clip is not None:
        bound = torch.where(advantages < 0, -advantages * config.dual_clip, torch.inf)
        metrics["clip_fraction_dual"] = objective > bound
        objective = torch.minimum(objective, bound)
    return objective, metrics


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _mean(values: Tensor, mean_weights: Tensor) -> Tensor:
    return (values.detach() * mean_weights).sum()


def _maximum(values: Tensor, kept: Tensor) -> Tensor:
    """The largest of the kept values, which are not negative; 0 if there are none."""
    return torch.nn.functional.pad(values.detach() * kept, (0, 1)).amax()
