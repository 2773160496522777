"""Float32 master weights beside bfloat16 weights, in 16 further bits per parameter.

A bfloat16 number is the upper half of a float32 number. The weight is the master, rounded; the remainder, an int16, is
what rounding took away. Together they take four bytes, as the master alone would, and give it back bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = 1 << 15


def split(masters: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (bfloat16) and remainders (int16) of `masters` (float32, contiguous), of the same shape.

    Rounds to nearest. Ties are rounded away from zero, not to even, since a remainder could not tell the two apart.
    """
    bits = masters.view(torch.int32)
    upper = bits.add(_HALF).bitwise_right_shift_(16)
    weights = upper.to(torch.int16).view(torch.bfloat16)
    remainders = bits.sub(upper.bitwise_left_shift_(16)).to(torch.int16)
    return weights, remainders


def joined(weights: Tensor, remainders: Tensor) -> Tensor:
    """The masters (float32) of `weights` and `remainders`."""
    bits = weights.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return bits.add_(remainders).view(torch.float32)


def stochastically_rounded(values: Tensor, generator: torch.Generator) -> Tensor:
    """`values` (float32, finite, contiguous) in bfloat16, rounded up or down at random, right on average.

    An average that moves by less than half a unit in the last place, as Adam's moments do, would otherwise stand still.
    """
    noise = torch.empty(values.shape, dtype=torch.int32, device=values.device).random_(0, 1 << 16, generator=generator)
    return noise.add_(values.view(torch.int32)).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)
