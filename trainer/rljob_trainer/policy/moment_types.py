"""The data types of AdamW's moments: from the state to float32 for an optimizer step, and back after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from rljob_trainer.policy.float32_masters import stochastically_rounded
from rljob_trainer.policy.optimizer_state import QUANTIZED, BucketState
from rljob_trainer.policy.quantized_moments import BLOCK, MomentQuantizer


@dataclass(frozen=True, slots=True)
class BucketStep:
    """One bucket in one optimizer step. Its random numbers depend on these, so that a replayed step repeats them."""

    seed: int
    """Of the job."""
    step: int
    bucket: int
    buckets: int
    start: int
    """Position of the bucket's first element in the state."""


class MomentType(Protocol):
    """One data type of the moments."""

    dtype: torch.dtype
    """Of the arrays `exp_avg` and `exp_avg_sq` in `OptimizerState`."""
    alignment: int
    """Each parameter's part of the state begins at a multiple of so many elements."""

    def read(self, state: BucketState) -> tuple[Tensor, Tensor]:
        """`exp_avg` and `exp_avg_sq` in float32; they may be the state's own tensors."""

    def keep(
        self, state: BucketState, moments: tuple[Tensor, Tensor], changed: Sequence[slice], at: BucketStep
    ) -> None:
        """Write the arrays that `read` returned, as changed by the step, to the state. `changed`: ranges of the bucket,
        of whole parameters or whole blocks; the rest keeps its bits."""


def moment_type(name: Literal["float32", "bfloat16", "int8"], device: torch.device) -> MomentType:
    """`name`: as in `PolicyConfig.moments`."""
    match name:
        case "float32":
            return _Float32()
        case "bfloat16":
            return _BFloat16(device)
        case "int8":
            return QuantizedType(device)


class _Float32:
    dtype, alignment = torch.float32, 1

    def read(self, state: BucketState) -> tuple[Tensor, Tensor]:
        return state.exp_avg, state.exp_avg_sq

    def keep(
        self, state: BucketState, moments: tuple[Tensor, Tensor], changed: Sequence[slice], at: BucketStep
    ) -> None:
        pass


class _BFloat16:
    """Rounded stochastically. Numbers without a change are bfloat16 numbers, which rounding keeps."""

    dtype, alignment = torch.bfloat16, 1

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self, state: BucketState) -> tuple[Tensor, Tensor]:
        return state.exp_avg.float(), state.exp_avg_sq.float()

    def keep(
        self, state: BucketState, moments: tuple[Tensor, Tensor], changed: Sequence[slice], at: BucketStep
    ) -> None:
        generator = torch.Generator(self._device)
        generator.manual_seed(at.seed + at.step * at.buckets + at.bucket)
        for target, values in zip((state.exp_avg, state.exp_avg_sq), moments, strict=True):
            target.copy_(stochastically_rounded(values, generator))


class QuantizedType:
    """Codes with scales (`quantized_moments`)."""

    dtype, alignment = QUANTIZED, BLOCK

    def __init__(self, device: torch.device) -> None:
        self.quantizer = MomentQuantizer(device)

    def read(self, state: BucketState) -> tuple[Tensor, Tensor]:
        assert state.exp_avg_scales is not None
        assert state.exp_avg_sq_scales is not None
        return (
            self.quantizer.dequantize("exp_avg", state.exp_avg, state.exp_avg_scales),
            self.quantizer.dequantize("exp_avg_sq", state.exp_avg_sq, state.exp_avg_sq_scales),
        )

    def keep(
        self, state: BucketState, moments: tuple[Tensor, Tensor], changed: Sequence[slice], at: BucketStep
    ) -> None:
        assert state.exp_avg_scales is not None
        assert state.exp_avg_sq_scales is not None
        first, second = moments
        draw = f"{at.seed}/{at.step}"
        self._copy(state.exp_avg, state.exp_avg_scales, self.quantizer.quantize("exp_avg", first), changed)
        quantized = self.quantizer.quantize("exp_avg_sq", second, start=at.start, draw=draw)
        self._copy(state.exp_avg_sq, state.exp_avg_sq_scales, quantized, changed)

    @staticmethod
    def _copy(codes: Tensor, scales: Tensor, quantized: tuple[Tensor, Tensor], changed: Sequence[slice]) -> None:
        if sum(each.stop - each.start for each in changed) == codes.numel():
            changed = [slice(0, codes.numel())]
        for each in changed:
            blocks = slice(each.start // BLOCK, each.stop // BLOCK)
            codes[each].copy_(quantized[0][each])
            scales[blocks].copy_(quantized[1][blocks])
