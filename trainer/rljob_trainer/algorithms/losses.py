"""Losses: functions of response tokens (`tokens.LossFunction`). Weights, importance sampling between engine and policy,
KL divergence and entropy are added by `objective`."""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_api.algorithms import AlgorithmSettings
from rljob_trainer.algorithms.tokens import Tokens, ratio_of


def clipped_ratio(tokens: Tokens, settings: AlgorithmSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """`−min(r A, clip(r) A)` with the ratio r = new / old probability of the token, and a bound for A < 0 (dualClip).

    Sources: PPO (arXiv 1707.06347 eq. 7), higher upper clip DAPO (arXiv 2503.14476 §3.1), dual clip (arXiv 1912.09729
    eq. 5).
    """
    return _clipped(ratio_of(tokens.logprobs - tokens.old_logprobs), tokens.advantages, settings)


def clipped_sequence_ratio(tokens: Tokens, settings: AlgorithmSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """The same with one ratio for each response, exp(mean log-ratio of its tokens).

    Source: GSPO (arXiv 2507.18071 eq. 5 and 7). Its gradient is that of the response's ratio also if tokens have
    different importance weights, unlike that of the form for tokens (eq. 13 and 14).
    """
    log_ratio = tokens.sequence_means(tokens.logprobs - tokens.old_logprobs)
    return _clipped(ratio_of(log_ratio), tokens.advantages, settings)


def clipped_weight(tokens: Tokens, settings: AlgorithmSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """`−sg(min(r, 1 + clipHigh)) A log π`: clipping bounds the weight of a token, and never removes its gradient.

    Source: CISPO (arXiv 2506.13585 eq. 4 and 5), without a lower clip, as there.
    """
    ratio = ratio_of(tokens.logprobs - tokens.old_logprobs).detach()
    bound = 1 + settings.clip_high
    return -ratio.clamp(max=bound) * tokens.advantages * tokens.logprobs, {"clip_fraction_high": ratio > bound}


def _clipped(ratio: Tensor, advantages: Tensor, settings: AlgorithmSettings) -> tuple[Tensor, dict[str, Tensor]]:
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss = torch.maximum(plain, clipped)
    was_clipped = clipped > plain
    metrics = {
        "clip_fraction_high": was_clipped & (advantages > 0),
        "clip_fraction_low": was_clipped & (advantages < 0),
    }
    if settings.dual_clip:
        bound = torch.where(advantages < 0, -advantages * settings.dual_clip, torch.inf)
        metrics["clip_fraction_dual"] = loss > bound
        loss = torch.minimum(loss, bound)
    return loss, metrics
