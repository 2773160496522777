"""A bfloat16 weight and its 16-bit remainder are the float32 master, bit for bit."""

from __future__ import annotations

import torch

from rljob_trainer.policy.float32_masters import joined, split, stochastically_rounded


def every_kind_of_float() -> torch.Tensor:
    """Random bits without infinities and NaNs, zeros of both signs, subnormals, extremes, and exact ties."""
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=torch.Generator().manual_seed(0))
    ties = (bits[:1_000] & ~0xFFFF) | 0x8000
    floats = torch.cat([bits, ties]).to(torch.int32).view(torch.float32)
    largest = torch.finfo(torch.float32).max
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-45, largest, -largest, 1.0, -1.0])
    return torch.cat([floats[floats.isfinite()], special])


def test_weight_and_remainder_give_the_master_back() -> None:
    masters = every_kind_of_float()
    weights, remainders = split(masters)
    assert weights.dtype == torch.bfloat16
    assert remainders.dtype == torch.int16
    assert torch.equal(joined(weights, remainders).view(torch.int32), masters.view(torch.int32))


def test_weights_are_the_nearest_bfloat16_numbers() -> None:
    masters = every_kind_of_float()
    weights, _ = split(masters)
    rounded = masters.bfloat16()
    is_tie = (masters.view(torch.int32) & 0xFFFF) == 0x8000
    assert is_tie.any()
    assert torch.equal(weights[~is_tie], rounded[~is_tie])


def test_stochastic_rounding_is_right_on_average_and_repeatable() -> None:
    value = 1.0 + 0.3 / 128  # three tenths of the way to the next bfloat16 number
    values = torch.full((100_000,), value)
    rounded = stochastically_rounded(values, torch.Generator().manual_seed(1))
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 1 / 128}
    assert abs(float(rounded.float().mean()) - value) < 0.02 / 128
    assert torch.equal(rounded, stochastically_rounded(values, torch.Generator().manual_seed(1)))
