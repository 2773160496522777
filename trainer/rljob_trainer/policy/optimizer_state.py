"""AdamW's moments and the remainders of the masters: flat arrays on the device, or streamed from host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rljob_trainer.policy.host_array import HostArray

BLOCK = 256
"""Quantized numbers with one scale."""

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
    """float32, one for each block of codes (`moments`); None if the moments are no codes."""
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


SLOTS = 3
"""One bucket arrives, one is worked on, one leaves."""

Copies = Sequence[tuple[Tensor, Tensor]]
"""Pairs of target and source."""


class Lanes(Protocol):
    """Three concurrent queues. Each runs its items in order; an item waits for the event `after`."""

    def fetch(self, copies: Copies, after: Any) -> Any:
        """Copy to the device. Returns the event of its completion."""

    def compute(self, work: Callable[[], None], after: Any) -> Any:
        """Run `work` on the device."""

    def write_back(self, copies: Copies, after: Any) -> Any:
        """Copy to the host."""

    def finish(self) -> None:
        """Return when all items are complete, also after an error."""


class InOrder:
    """The lanes of a device without queues: each item is complete when its call returns."""

    def fetch(self, copies: Copies, after: None) -> None:
        _copy(copies)

    def compute(self, work: Callable[[], None], after: None) -> None:
        work()

    def write_back(self, copies: Copies, after: None) -> None:
        _copy(copies)

    def finish(self) -> None:
        pass


class CudaLanes:
    """Two streams for the copies, made once, since torch keeps memory apart for each stream; work is on the current
    stream."""

    def __init__(self) -> None:
        self._in, self._out = torch.cuda.Stream(), torch.cuda.Stream()

    def fetch(self, copies: Copies, after: torch.cuda.Event | None) -> torch.cuda.Event:
        # Without an event the slot is new: its memory may still be in use by earlier work.
        return _copied_on(self._in, copies, after or torch.cuda.current_stream().record_event())

    def compute(self, work: Callable[[], None], after: torch.cuda.Event) -> torch.cuda.Event:
        torch.cuda.current_stream().wait_event(after)
        work()
        done: torch.cuda.Event = torch.cuda.current_stream().record_event()
        return done

    def write_back(self, copies: Copies, after: torch.cuda.Event) -> torch.cuda.Event:
        return _copied_on(self._out, copies, after)

    def finish(self) -> None:
        self._in.synchronize()
        self._out.synchronize()


def lanes_of(device: torch.device) -> Lanes:
    return CudaLanes() if device.type == "cuda" else InOrder()


def stream_through(
    lanes: Lanes,
    device: torch.device,
    arrays: Sequence[Tensor],
    buckets: Sequence[slice],
    work: Callable[[int, list[Tensor]], None],
    granularities: Sequence[int] | None = None,
) -> None:
    """Call `work(bucket, parts)` for each bucket, with its part of each array on `device`, and keep what it writes.

    While one bucket is worked on, the next is copied in and the one before it is copied out. At most `SLOTS` buckets
    are on the device.

    `arrays`: one-dimensional, in host memory. `granularities`: elements of a bucket for each entry of an array, which
    divide the bounds of the buckets; one if None. Returns when they hold the results. After an error, the buckets
    before the failing one may have changed; the others have not.
    """
    elements = granularities or [1] * len(arrays)
    largest = max((bucket.stop - bucket.start for bucket in buckets), default=0)
    slots = [
        [
            torch.empty(largest // each, dtype=array.dtype, device=device)
            for array, each in zip(arrays, elements, strict=True)
        ]
        for _ in range(min(SLOTS, len(buckets)))
    ]
    fetched: list[Any] = []
    written: list[Any] = []

    def parts(bucket: int) -> list[Tensor]:
        length = buckets[bucket].stop - buckets[bucket].start
        return [array[: length // each] for array, each in zip(slots[bucket % len(slots)], elements, strict=True)]

    def on_host(bucket: int) -> list[Tensor]:
        return [entries_of(array, buckets[bucket], each) for array, each in zip(arrays, elements, strict=True)]

    def fetch(bucket: int) -> None:
        previous = bucket - len(slots)
        pairs = list(zip(parts(bucket), on_host(bucket), strict=True))
        fetched.append(lanes.fetch(pairs, written[previous] if previous >= 0 else None))

    try:
        for bucket in range(len(buckets)):
            while len(fetched) < min(bucket + len(slots), len(buckets)):
                fetch(len(fetched))
            on_device = parts(bucket)
            worked = lanes.compute(lambda b=bucket, p=on_device: work(b, p), fetched[bucket])  # type: ignore[misc]
            back = list(zip(on_host(bucket), on_device, strict=True))
            written.append(lanes.write_back(back, worked))
    finally:
        lanes.finish()


def entries_of(array: Tensor, elements: slice, granularity: int) -> Tensor:
    """The entries of `array` for a range of elements, if each is for `granularity` elements. Shares its memory."""
    return array[elements.start // granularity : elements.stop // granularity]


def _copy(copies: Copies) -> None:
    for target, source in copies:
        target.copy_(source)


def _copied_on(stream: torch.cuda.Stream, copies: Copies, after: torch.cuda.Event) -> torch.cuda.Event:
    with torch.cuda.stream(stream):
        stream.wait_event(after)
        for target, source in copies:
            target.copy_(source, non_blocking=True)
        done: torch.cuda.Event = stream.record_event()
        return done


_HALF = 1 << 15


def split(masters: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (bfloat16) and remainders (int16) of `masters` (float32, contiguous), of the same shape.

    A bfloat16 number is the upper half of a float32 number. The weight is the master, rounded; the remainder is what
    rounding took away. Together they take four bytes, as the master alone would, and give it back bit for bit.

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
