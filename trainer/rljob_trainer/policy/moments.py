"""The data types of AdamW's moments: from the state to float32 for an optimizer step, and back after it.

In 8 bits: blocks of 256 numbers, each with a float32 scale and codes of a dynamic map. Block-wise dynamic quantization
(Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization") with the maps of bitsandbytes and torchao; their
spacing is finer near zero. 1 + 4/256 bytes a number. Written here, not imported: torchao's functions
(`torchao.optim.quant_utils` 0.18) are outside its public API, and need `torch.compile`: without it, they have
int64 temporaries. Four points differ, for the small gradients of RL:

- The map of `exp_avg_sq` has the squares of the dynamic map's numbers, so that its root, by which AdamW divides, has
  the map's spacing and range.
- `exp_avg_sq` is rounded up or down at random, right on average. It moves by a thousandth of a difference in a step,
  and codes are 1 % to 50 % apart: rounded to nearest, it would stand still. `exp_avg` moves by a tenth.
- A second moment other than zero is never rounded to zero: epsilon alone would divide its step.
- A scale may be as small as the smallest normal float32. torchao's is at least 1e-12, the square of a gradient of 1e-6.

An element's result depends on its block and its position in the state of its rank alone: neither on the bucket, nor on
where the state is.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rljob_trainer.policy.optimizer_state import BLOCK, QUANTIZED, State, stochastically_rounded

CHUNK = 1 << 23
"""Numbers that are quantized at a time, so that temporaries take 32 MiB each. On an H200, both moments of 8.19e9
parameters took 0.74 s, there and back (1.00 s with 2^22, where launches take longer than kernels; 0.66 s with 2^25)."""

_DECADES = 7
"""Decades below 1 that a dynamic map covers."""

_OFFSETS = 1 << 20
"""Places in a table of random numbers where the noise of a chunk may start: the multiples of `_ALIGNED` below it."""
_ALIGNED = 4
_NOISE_BITS = 16
"""Bits of noise. With more, the sum of the highest code and the noise could be rounded up to 256 in float32."""
_NEAREST = 0.5
"""Noise with which a number is rounded to the nearest code."""

Moment = Literal["exp_avg", "exp_avg_sq"]
MOMENTS: tuple[Moment, Moment] = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class BucketStep:
    """One bucket in one optimizer step. Its random numbers depend on these, so that a replayed step repeats them."""

    seed: int
    """Seed of the job."""
    step: int
    bucket: int
    buckets: int
    start: int
    """Position of the bucket's first element in the state."""


class MomentType:
    """Moments in float32, and the base of the other data types."""

    dtype = torch.float32
    """Data type of the arrays `exp_avg` and `exp_avg_sq` in `OptimizerState`."""
    alignment = 1
    """Each parameter's part of the state begins at a multiple of it."""

    def read(self, state: State) -> dict[Moment, Tensor]:
        """Both moments in float32, [elements]; they may be the state's own tensors."""
        return {moment: state[moment] for moment in MOMENTS}

    def keep(self, state: State, moments: dict[Moment, Tensor], changed: Sequence[slice], at: BucketStep) -> None:
        """Write the arrays that `read` returned, [elements], as changed by the step, to the state. `changed`: ranges of
        the bucket, of whole parameters or whole blocks; the rest keeps its bits."""


def moment_type(name: Literal["float32", "bfloat16", "int8"], device: torch.device) -> MomentType:
    """`name`: as in `PolicyConfig.moments`."""
    match name:
        case "float32":
            return MomentType()
        case "bfloat16":
            return _BFloat16(device)
        case "int8":
            return QuantizedType(device)


class _BFloat16(MomentType):
    """Rounded stochastically. Numbers without a change are bfloat16 numbers, which rounding keeps."""

    dtype = torch.bfloat16

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self, state: State) -> dict[Moment, Tensor]:
        return {moment: state[moment].float() for moment in MOMENTS}

    def keep(self, state: State, moments: dict[Moment, Tensor], changed: Sequence[slice], at: BucketStep) -> None:
        generator = torch.Generator(self._device)
        generator.manual_seed(at.seed + at.step * at.buckets + at.bucket)
        for moment in MOMENTS:
            state[moment].copy_(stochastically_rounded(moments[moment], generator))


@dataclass(frozen=True, slots=True)
class CodeMap:
    """Numbers that codes represent, before they are multiplied by their block's scale, and how to find a code."""

    values: Tensor
    """Float32, 256, ascending."""
    zero: int
    """Place of zero among the values. Codes are counted from it, modulo 256, so that an array of zeros is zero."""
    slopes: Tensor
    """`slopes[i] * x + offsets[i]` is the code of `x`, as a real number, if `i` of the values are below `x`."""
    offsets: Tensor
    """See `slopes`."""
    lowest: float
    """The smallest of the values; the largest is 1."""


class QuantizedType(MomentType):
    """Codes with scales of a dynamic map. The tables take 36 MiB on the device."""

    dtype, alignment = QUANTIZED, BLOCK

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._maps = {"exp_avg": signed_map(device), "exp_avg_sq": squared_map(device)}
        self._by_code = {moment: each.values.roll(-each.zero) for moment, each in self._maps.items()}
        draw = torch.Generator().manual_seed(0)
        noise = torch.randint(0, 1 << _NOISE_BITS, (CHUNK + _OFFSETS,), generator=draw, dtype=torch.int32)
        self._noise = noise.float().mul_(2.0**-_NOISE_BITS).to(device)

    def read(self, state: State) -> dict[Moment, Tensor]:
        return {moment: self.dequantize(moment, state[moment], state[f"{moment}_scales"]) for moment in MOMENTS}

    def keep(self, state: State, moments: dict[Moment, Tensor], changed: Sequence[slice], at: BucketStep) -> None:
        if sum(each.stop - each.start for each in changed) == len(state["exp_avg"]):
            changed = [slice(0, len(state["exp_avg"]))]
        for moment, draw in zip(MOMENTS, (None, f"{at.seed}/{at.step}"), strict=True):
            codes, scales = self.quantize(moment, moments[moment], start=at.start, draw=draw)
            for each in changed:
                blocks = slice(each.start // BLOCK, each.stop // BLOCK)
                state[moment][each].copy_(codes[each])
                state[f"{moment}_scales"][blocks].copy_(scales[blocks])

    def dequantize(self, moment: Moment, codes: Tensor, scales: Tensor) -> Tensor:
        """The numbers, float32, [elements]. `codes`: uint8, [elements], whole blocks; `scales`: [blocks]."""
        values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
        for start in range(0, codes.numel(), CHUNK):
            piece = slice(start, start + CHUNK)
            values[piece] = self.values_of(moment, codes[piece])
        values.view(-1, BLOCK).mul_(scales[:, None])
        return values

    def values_of(self, moment: Moment, codes: Tensor) -> Tensor:
        """The numbers, float32, [n], that `codes`, [n], represent before they are multiplied by the scales."""
        return self._by_code[moment].index_select(0, codes.int())

    def quantize(
        self, moment: Moment, values: Tensor, *, start: int = 0, draw: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Codes, [elements], and scales, [blocks], of `values` (float32, [elements], whole blocks, contiguous).

        `start`: position of the first in the state, a multiple of `BLOCK`. `draw`: name of the random numbers, which
        depend on it and on the position. None: round to the nearest code.
        """
        codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
        scales = values.new_empty(values.numel() // BLOCK)
        done = 0
        while done < values.numel():
            chunk, within = divmod(start + done, CHUNK)
            length = min(CHUNK - within, values.numel() - done)
            piece, blocks = slice(done, done + length), slice(done // BLOCK, (done + length) // BLOCK)
            noise: Tensor | float = _NEAREST
            if draw is not None:
                first = within + random.Random(f"{draw}/{chunk}").randrange(0, _OFFSETS, _ALIGNED)
                noise = self._noise[first : first + length]
            _quantize(values[piece].view(-1, BLOCK), self._maps[moment], codes[piece], scales[blocks], noise)
            done += length
        return codes, scales


def signed_map(device: torch.device) -> CodeMap:
    """The signed dynamic map: 0, 1, and in each decade below 1 the centers of equal intervals, with both signs.

    64 intervals in the highest decade, half as many in each decade below it, as in `create_dynamic_map` of bitsandbytes
    (functional.py) and torchao (optim/quant_utils.py).
    """
    centers = _centers(intervals=1)
    return _map_of(torch.cat([-centers, torch.zeros(1), centers, torch.ones(1)]), device)


def squared_map(device: torch.device) -> CodeMap:
    """The squares of the unsigned dynamic map, which has twice as many intervals in each decade as the signed one."""
    centers = _centers(intervals=2)
    found = _map_of(torch.cat([torch.zeros(1), centers, torch.ones(1)]).square(), device)
    found.slopes[1], found.offsets[1] = 0.0, 1.0  # above zero, but never rounded down to it
    return found


def _centers(intervals: int) -> Tensor:
    """Centers of the intervals of seven decades, float64. `intervals`: number in the lowest decade."""
    centers = []
    for decade in range(_DECADES):
        edges = torch.linspace(0.1, 1.0, intervals * 2**decade + 1, dtype=torch.float64)
        centers.append((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade + 1 - _DECADES))
    return torch.cat(centers)


def _map_of(values: Tensor, device: torch.device) -> CodeMap:
    """`values`: float64, 256, in any order."""
    values = values.sort().values
    slopes = torch.cat([torch.zeros(1), 1 / values.diff()])
    offsets = torch.arange(-1.0, len(values) - 1) - torch.cat([values[:1], values[:-1]]) * slopes
    offsets[0] = 0.0
    zero, lowest = int(values.eq(0).nonzero()), float(values[0].float())
    return CodeMap(values.float().to(device), zero, slopes.float().to(device), offsets.float().to(device), lowest)


def _quantize(values: Tensor, codes_of: CodeMap, codes: Tensor, scales: Tensor, noise: Tensor | float) -> None:
    """Write codes and scales of one chunk. `values`: blocks × 256. `noise`: in [0, 1), by element or one for all.

    A block without a normal number becomes zeros.
    """
    if codes_of.lowest < 0:
        # The map has no -1: the scale is large enough for the lowest number, too.
        lowest, highest = torch.aminmax(values, dim=-1)
        scale = torch.maximum(highest, lowest / codes_of.lowest)
    else:
        scale = values.amax(-1)
    smallest = torch.finfo(torch.float32).tiny
    scale = torch.where(scale < smallest, 0.0, scale)
    scales.copy_(scale)
    scaled = (values / scale.clamp_min(smallest)[:, None]).view(-1)
    above = torch.bucketize(scaled, codes_of.values[:-1], out_int32=True)
    code = scaled.mul_(codes_of.slopes.index_select(0, above)).add_(codes_of.offsets.index_select(0, above))
    codes.copy_(code.add_(noise))
    if codes_of.zero:
        codes.sub_(codes_of.zero)
