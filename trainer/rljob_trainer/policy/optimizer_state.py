"""AdamW's moments and the remainders of the masters: flat arrays on the device, or streamed from host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rljob_trainer.policy.bucket_stream import lanes_of, stream_through
from rljob_trainer.policy.host_array import HostArray


@dataclass(frozen=True, slots=True)
class BucketState:
    """The state of one bucket, on the device; each one-dimensional. Written in place."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    remainders: Tensor | None
    """int16; None if no weight is kept in bfloat16."""


class OptimizerState:
    """The state of `elements` parameters of one rank, in the order of the parameters.

    `moments`: dtype of both moments. `split`: some weights are bfloat16, with remainders (`float32_masters`).
    """

    def __init__(self, elements: int, device: torch.device, moments: torch.dtype, *, split: bool, offload: bool):
        self._elements, self._device = elements, device
        self._dtypes = [moments, moments, *([torch.int16] if split else [])]
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
        return self._elements * sum(dtype.itemsize for dtype in self._dtypes)

    def arrays(self) -> BucketState:
        """The whole state, where it is: on the device or in host memory."""
        return BucketState(*_padded(self._tensors()))

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
                self._tensors(),
                buckets,
                lambda bucket, parts: work(bucket, BucketState(*_padded(parts))),
            )
        else:
            for number, bucket in enumerate(buckets):
                work(number, BucketState(*_padded([array[bucket] for array in self._on_device])))

    def _tensors(self) -> list[Tensor]:
        return [array.tensor for array in self._on_host] or self._on_device

    def _host_arrays(self) -> list[HostArray]:
        return [HostArray(self._elements, dtype, pinned=self._device.type == "cuda") for dtype in self._dtypes]

    def _device_arrays(self, sources: Sequence[HostArray] = ()) -> list[Tensor]:
        arrays = [torch.zeros(self._elements, dtype=dtype, device=self._device) for dtype in self._dtypes]
        for array, source in zip(arrays, sources, strict=False):
            array.copy_(source.tensor)
        return arrays


def _padded(arrays: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    exp_avg, exp_avg_sq, *remainders = arrays
    return exp_avg, exp_avg_sq, remainders[0] if remainders else None
