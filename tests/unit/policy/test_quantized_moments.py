"""Moments in 8 bits: bounds of the rounding error, extremes, blocks, and the same codes in any cut of the state."""

from __future__ import annotations

import math

import pytest
import torch

from rljob_trainer.policy.moments import (
    CHUNK,
    MOMENTS,
    Moment,
    QuantizedType,
    signed_map,
    squared_map,
)
from rljob_trainer.policy.optimizer_state import BLOCK

CPU = torch.device("cpu")
QUANTIZER = QuantizedType(CPU)
SMALLEST = {"exp_avg": 5.5e-7, "exp_avg_sq": 3.25e-7**2}
"""The smallest number above zero of each map, of a block whose largest is 1."""


def round_trip(moment: Moment, values: torch.Tensor, draw: str | None = None) -> torch.Tensor:
    return QUANTIZER.dequantize(moment, *QUANTIZER.quantize(moment, values, draw=draw))


def spread(moment: Moment, elements: int, decades: float = 4.0) -> torch.Tensor:
    """Numbers whose magnitudes are spread over `decades`, scaled by block."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(elements, generator=draw) * 10 ** (-decades * torch.rand(elements, generator=draw))
    values *= 10 ** (-8 * torch.rand(elements // BLOCK, generator=draw)).repeat_interleave(BLOCK)
    return values if moment == "exp_avg" else values.square()


def test_the_signed_map_is_that_of_bitsandbytes() -> None:
    """Its numbers, as `create_dynamic_map` gives them: from -0.993 to 1, 64 to a decade at the top, 1 at the bottom."""
    values = signed_map(CPU).values
    assert (len(values), float(values[-1]), float(values[127])) == (256, 1.0, 0.0)
    torch.testing.assert_close(values[:127], -values[128:255].flip(0))
    assert int((values.abs().double() < 1e-6).sum()) == 3, "zero, and one number of each sign"
    assert int(((values > 0.1) & (values < 1)).sum()) == 64
    assert float(values[0]) == pytest.approx(-(1 - 0.9 / 128))


def test_the_map_of_second_moments_has_the_squares_of_the_unsigned_one() -> None:
    values = squared_map(CPU).values
    assert (len(values), float(values[0]), float(values[-1])) == (256, 0.0, 1.0)
    assert bool((values.diff() > 0).all())
    roots = values.sqrt()
    assert int(((roots > 0.1) & (roots < 1)).sum()) == 128
    assert float(values[1]) == pytest.approx(SMALLEST["exp_avg_sq"], rel=1e-3)


@pytest.mark.parametrize("moment", MOMENTS)
def test_every_number_of_a_map_is_kept_bit_for_bit(moment: Moment) -> None:
    values = QUANTIZER.values_of(moment, torch.arange(256).to(torch.uint8))
    for scale in (1.0, 2.0**-60, 3e-9):
        assert torch.equal(round_trip(moment, values * scale), values * scale)


@pytest.mark.parametrize("draw", [None, "some"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_number_becomes_one_of_the_two_next_to_it(moment: Moment, draw: str | None) -> None:
    values = spread(moment, 40 * BLOCK)
    found = round_trip(moment, values, draw)
    codes, scales = QUANTIZER.quantize(moment, values)
    assert (codes.dtype, codes.shape, scales.dtype, scales.shape) == (torch.uint8, values.shape, torch.float32, (40,))
    numbers = QUANTIZER.values_of(moment, torch.arange(256).to(torch.uint8)).sort().values
    scaled = values.view(-1, BLOCK) / scales[:, None]
    above = torch.bucketize(scaled.contiguous(), numbers).clamp(1, 255)
    gap = (numbers[above] - numbers[above - 1]) * scales[:, None]
    error = (found - values).view(-1, BLOCK).abs()
    bound = gap * (0.5 if draw is None else 1.0)
    if moment == "exp_avg_sq":
        bound[above == 1] = gap[above == 1]  # up to the smallest number, never down to zero
    assert bool((error <= bound * 1.001 + 1e-6 * values.view(-1, BLOCK).abs()).all())


def test_random_rounding_is_right_on_average() -> None:
    values = spread("exp_avg_sq", 4 * BLOCK, decades=1.0)
    draws = 400
    mean = torch.stack([round_trip("exp_avg_sq", values, f"draw {number}") for number in range(draws)]).mean(0)
    nearest = round_trip("exp_avg_sq", values)
    errors = ((mean - values) / values).abs()
    assert float(errors.mean()) < 0.1 * float(((nearest - values) / values).abs().mean())


def test_zeros_denormals_and_extremes() -> None:
    for moment in MOMENTS:
        zeros = torch.zeros(2 * BLOCK)
        codes, scales = QUANTIZER.quantize(moment, zeros)
        assert not codes.any(), "as in an array that was just made"
        assert not scales.any()
        assert torch.equal(round_trip(moment, zeros), zeros)
        assert torch.equal(round_trip(moment, torch.full((BLOCK,), 1e-40)), zeros[:BLOCK]), "no normal number"
        for magnitude in (1.2e-38, 1e-30, 1e-12, 3e38):
            one = torch.zeros(BLOCK)
            one[7] = magnitude
            assert torch.equal(round_trip(moment, one), one), magnitude
            assert torch.equal(round_trip("exp_avg", -one), -one), "the map has no -1: the scale makes up for it"


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_not_finite_is_not_hidden(value: float) -> None:
    values = torch.ones(2 * BLOCK)
    values[3] = value
    found = round_trip("exp_avg", values)
    assert not bool(found[:BLOCK].isfinite().all())
    assert torch.equal(found[BLOCK:], torch.ones(BLOCK)), "other blocks are not affected"


def test_a_second_moment_other_than_zero_never_becomes_zero() -> None:
    values = torch.ones(BLOCK)
    values[1:100] = torch.logspace(-36, -14, 99)
    values[100] = 0.0
    for draw in (None, "some", "other"):
        found = round_trip("exp_avg_sq", values, draw)
        assert bool((found[1:100] > 0).all())
        assert float(found[100]) == 0.0


def test_a_cut_anywhere_between_blocks_gives_the_same_codes() -> None:
    """Also where a chunk ends: random numbers depend on the position in the state."""
    values = spread("exp_avg_sq", 6 * BLOCK)
    first = CHUNK - 2 * BLOCK
    codes, scales = QUANTIZER.quantize("exp_avg_sq", values, start=first, draw="step 3")
    for cut in (1, 2, 3, 5):
        parts = [
            QUANTIZER.quantize("exp_avg_sq", part.contiguous(), start=first + start, draw="step 3")
            for start, part in ((0, values[: cut * BLOCK]), (cut * BLOCK, values[cut * BLOCK :]))
        ]
        assert torch.equal(torch.cat([part[0] for part in parts]), codes)
        assert torch.equal(torch.cat([part[1] for part in parts]), scales)
    whole, _ = QUANTIZER.quantize("exp_avg_sq", values)
    for block in range(6):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        assert torch.equal(QUANTIZER.quantize("exp_avg_sq", values[part].clone())[0], whole[part])
    other, _ = QUANTIZER.quantize("exp_avg_sq", values, start=first, draw="step 4")
    assert not torch.equal(codes, other), "another step draws other numbers"
