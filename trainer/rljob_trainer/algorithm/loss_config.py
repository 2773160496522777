"""The settings of the loss. Free of torch, so that the controller can import it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Aggregation = Literal["token-mean", "sequence-mean"]
ImportanceSampling = Literal["off", "truncate", "mask"]


@dataclass(frozen=True, slots=True)
class LossConfig:
    """Settings of `policy_loss`."""

    clip_low: float = 0.2
    """The probability ratio is clipped to [1 − clip_low, 1 + clip_high]."""

    clip_high: float = 0.28

    dual_clip: float | None = 3.0
    """For negative advantages A, the loss is at most `−A × dual_clip`. None disables this bound."""

    aggregation: Aggregation = "token-mean"
    """`token-mean` gives every token of the batch the same weight, `sequence-mean` every completion."""

    importance_sampling: ImportanceSampling = "truncate"
    """Correction for the mismatch between engine and policy, by the ratio policy / engine of a token's probability.
    `truncate`: weight min(ratio, cap). `mask`: weight ratio, but 0 outside [1 / cap, cap]. `off`: weight 1."""

    importance_sampling_cap: float = 2.0
    """The cap of the ratio, > 1."""

    kl_coefficient: float = 0.0
    """Weight of the KL divergence from the initial model. 0 needs no reference model."""

    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""
