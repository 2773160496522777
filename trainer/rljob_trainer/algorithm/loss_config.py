"""The settings of the loss. Free of torch, so that the controller can make one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Aggregation = Literal["token-mean", "sequence-mean"]
ImportanceSampling = Literal["off", "truncate", "mask"]


@dataclass(frozen=True, slots=True)
class LossConfig:
    """Settings of `policy_loss`.

    `clip_low`, `clip_high`: the ratio is clipped to [1 − clip_low, 1 + clip_high].
    `dual_clip`: for negative advantages the loss is at most `−A × dual_clip`; None switches that off.
    `aggregation`: `token-mean` weighs every token of the batch alike, `sequence-mean` every completion.
    `importance_sampling`: what corrects for the engine and the policy disagreeing about a token's probability, by the
    ratio policy / engine: `truncate` weighs the token by min(ratio, cap); `mask` by the ratio, and by 0 outside
    [1 / cap, cap]; `off` by 1. `importance_sampling_cap`: that cap, > 1.
    `kl_coefficient`: weight of the KL divergence from the initial model; 0 needs no reference model.
    `entropy_coefficient`: weight of the entropy bonus.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = 3.0
    aggregation: Aggregation = "token-mean"
    importance_sampling: ImportanceSampling = "truncate"
    importance_sampling_cap: float = 2.0
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0
