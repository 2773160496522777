"""AdamW's moments and the remainders of the masters: flat arrays on the device, or streamed from host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rljob_trainer.policy.bucket_stream import entries_of, lanes_of, stream_through
from rljob_trainer.policy.host_array import HostArray
from rljob_trainer.policy.quantized_moments import BLOCK

QUANTIZED = torch.uint8
"""The dtype of moments that are codes with scales."""


@dataclass(frozen=True, slots=True)
class BucketState:
    """The state of one bucket, on the device; each one-dimensional. Written in place."""

    exp_avg: Tensor
    """float32, bfloat16, or codes (uint8)."""
    exp_avg_sq: Tensor
    """As `exp_avg`."""
    remainders: Tensor | None = None
    """int16; None if no weight is kept in bfloat16."""
    exp_avg_scales: Tensor | None = None
    """float32, one for each block of codes (`quantized_moments`); None if the moments are no codes."""
    exp_avg_sq_scales: Tensor | None = None
    """As `exp_avg_scales`."""


@dataclass(frozen=True, slots=True)
class _Array:
    dtype: torch.dtype
    granularity: int = 1
    """Elements of the state for each entry."""

    def length(self, elements: int) -> int:
        return elements // self.granularity


_SCALES = _Array(torch.float32, BLOCK)


class OptimizerState:
    """The state of `elements` parameters of one rank, in the order of the parameters.

    `moments`: dtype of both moments; `QUANTIZED`: codes with scales, and `elements` are whole blocks. `split`: some
    weights are bfloat16, with remainders (`float32_masters`).
    """

    def __init__(self, elements: int, device: torch.device, moments: torch.dtype, *, split: bool, offload: bool):
        self._elements, self._device = elements, device
        self._layout = {"exp_avg": _Array(moments), "exp_avg_sq": _Array(moments)}
        if split:
            self._layout["remainders"] = _Array(torch.int16)
        if moments == QUANTIZED:
            self._layout |= {"exp_avg_scales": _SCALES, "exp_avg_sq_scales": _SCALES}
        self._lanes = lanes_of(device)
        self._on_host: list[HostArray] = []
        self._on_device: list[Tensor] = []
        if offload:
            self._on_host = self._host_arrays()
        else:
            self._on_device = self._device_arrays()

    @property
    def offloaded(self) -> bool:
        return bool(self._on_host)

    @property
    def nbytes(self) -> int:
        return sum(each.length(self._elements) * each.dtype.itemsize for each in self._layout.values())

    def arrays(self) -> BucketState:
        """The whole state, where it is: on the device or in host memory."""
        return self._state(self.tensors())

    def offload(self, *, enabled: bool) -> None:
        """Move the state to host memory, or to the device. It stays where it is if it is there already."""
        if enabled == self.offloaded:
            return
        if enabled:
            arrays = self._host_arrays()
            for array, tensor in zip(arrays, self._on_device, strict=True):
                array.tensor.copy_(tensor)
            self._on_host, self._on_device = arrays, []
        else:
            self._on_device = self._device_arrays(self._on_host)
            self._on_host = []

    def each(self, buckets: Sequence[slice], work: Callable[[int, BucketState], None]) -> None:
        """Call `work` for each bucket, with its state on the device."""
        if self.offloaded:
            stream_through(
                self._lanes,
                self._device,
                self.tensors(),
                buckets,
                lambda bucket, parts: work(bucket, self._state(parts)),
                [each.granularity for each in self._layout.values()],
            )
        else:
            for number, bucket in enumerate(buckets):
                parts = zip(self._on_device, self._layout.values(), strict=True)
                work(number, self._state([entries_of(array, bucket, each.granularity) for array, each in parts]))

    def tensors(self) -> list[Tensor]:
        """All arrays, where they are."""
        return [array.tensor for array in self._on_host] or self._on_device

    def _host_arrays(self) -> list[HostArray]:
        return [
            HostArray(
                each.length(self._elements),
                each.dtype,
                pinned=self._device.type == "cuda",
                purpose="the optimizer's state",
                advice="write memory.optimizerOffload: Disabled",
            )
            for each in self._layout.values()
        ]

    def _device_arrays(self, sources: Sequence[HostArray] = ()) -> list[Tensor]:
        arrays = [
            torch.zeros(each.length(self._elements), dtype=each.dtype, device=self._device)
            for each in self._layout.values()
        ]
        for array, source in zip(arrays, sources, strict=False):
            array.copy_(source.tensor)
        return arrays

    def _state(self, arrays: Sequence[Tensor]) -> BucketState:
        return BucketState(**dict(zip(self._layout, arrays, strict=True)))
