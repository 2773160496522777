"""AdamW's moments and the remainders of the masters: flat arrays on the device, or streamed from host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rljob_trainer.policy.host_array import HostArray

BLOCK = 256
"""Quantized numbers with one scale."""

QUANTIZED = torch.uint8
"""The dtype of moments that are codes with scales."""

State = Mapping[str, Tensor]
"""One-dimensional arrays, written in place. With an entry for each element: `exp_avg` and `exp_avg_sq` (float32,
bfloat16, or codes in uint8), and `remainders` (int16) if a weight is kept in bfloat16. With an entry for each block of
codes: `exp_avg_scales` and `exp_avg_sq_scales` (float32)."""


def entries(name: str, elements: slice) -> slice:
    """The entries of the array `name` for a range of elements of the state; the range consists of whole blocks if the
    moments are codes."""
    each = BLOCK if name.endswith("_scales") else 1
    return slice(elements.start // each, elements.stop // each)


class OptimizerState:
    """The state of `elements` parameters of one rank, in the order of the parameters.

    `moments`: dtype of both moments; `QUANTIZED`: codes with scales, and `elements` are whole blocks. `split`: some
    weights are bfloat16, with remainders (see `split`).
    """

    def __init__(self, elements: int, device: torch.device, moments: torch.dtype, *, split: bool, offload: bool):
        self._elements, self._device = elements, device
        self._dtypes = {"exp_avg": moments, "exp_avg_sq": moments}
        if split:
            self._dtypes["remainders"] = torch.int16
        if moments == QUANTIZED:
            self._dtypes |= {"exp_avg_scales": torch.float32, "exp_avg_sq_scales": torch.float32}
        self._lanes = lanes_of(device)
        self._on_host: dict[str, HostArray] = {}
        self._on_device: dict[str, Tensor] = {}
        if offload:
            self._on_host = self._host_arrays()
        else:
            self._on_device = self._device_arrays()

    @property
    def offloaded(self) -> bool:
        return bool(self._on_host)

    @property
    def nbytes(self) -> int:
        return sum(self._length(name) * dtype.itemsize for name, dtype in self._dtypes.items())

    def arrays(self) -> State:
        """The whole state, where it is: on the device or in host memory."""
        return {name: array.tensor for name, array in self._on_host.items()} or self._on_device

    def offload(self, *, enabled: bool) -> None:
        """Move the state to host memory, or to the device. It stays where it is if it is there already."""
        if enabled == self.offloaded:
            return
        former = self.arrays()
        if enabled:
            on_host = self._host_arrays()
            for name, array in on_host.items():
                array.tensor.copy_(former[name])
            self._on_host, self._on_device = on_host, {}
        else:
            on_device = self._device_arrays()
            for name, tensor in on_device.items():
                tensor.copy_(former[name])
            self._on_host, self._on_device = {}, on_device

    def each(self, buckets: Sequence[slice], work: Callable[[int, State], None]) -> None:
        """Call `work` for each bucket, with its state on the device."""
        whole = self.arrays()
        parts = [[array[entries(name, bucket)] for name, array in whole.items()] for bucket in buckets]

        def work_on(number: int, on_device: Sequence[Tensor]) -> None:
            work(number, dict(zip(whole, on_device, strict=True)))

        if self.offloaded:
            stream_through(self._lanes, self._device, parts, work_on)
        else:
            for number, part in enumerate(parts):
                work_on(number, part)

    def _length(self, name: str) -> int:
        return int(entries(name, slice(0, self._elements)).stop)

    def _host_arrays(self) -> dict[str, HostArray]:
        return {
            name: HostArray(
                self._length(name),
                dtype,
                pinned=self._device.type == "cuda",
                purpose="the optimizer's state",
                advice="write memory.optimizerOffload: Disabled",
            )
            for name, dtype in self._dtypes.items()
        }

    def _device_arrays(self) -> dict[str, Tensor]:
        return {
            name: torch.zeros(self._length(name), dtype=dtype, device=self._device)
            for name, dtype in self._dtypes.items()
        }


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
    lanes: Lanes, device: torch.device, buckets: Sequence[Sequence[Tensor]], work: Callable[[int, list[Tensor]], None]
) -> None:
    """Call `work(bucket, parts)` for each bucket, with its parts on `device`, and keep what it writes.

    While one bucket is worked on, the next is copied in and the one before it is copied out. At most `SLOTS` buckets
    are on the device.

    `buckets`: the parts of each, [elements], in host memory; part i has the same dtype in all buckets. Returns
    when they hold the results. After an error, the buckets before the failing one may have changed; the others have
    not.
    """
    slots = [
        [torch.empty(max(map(len, parts)), dtype=parts[0].dtype, device=device) for parts in zip(*buckets, strict=True)]
        for _ in range(min(SLOTS, len(buckets)))
    ]
    fetched: list[Any] = []
    written: list[Any] = []

    def pairs(bucket: int) -> list[tuple[Tensor, Tensor]]:
        """The parts of a bucket on the device and on the host."""
        slot = slots[bucket % len(slots)]
        return [(array[: len(part)], part) for array, part in zip(slot, buckets[bucket], strict=True)]

    try:
        for bucket in range(len(buckets)):
            while len(fetched) < min(bucket + len(slots), len(buckets)):
                previous = len(fetched) - len(slots)
                fetched.append(lanes.fetch(pairs(len(fetched)), written[previous] if previous >= 0 else None))
            on_device = [part for part, _ in pairs(bucket)]
            worked = lanes.compute(lambda b=bucket, p=on_device: work(b, p), fetched[bucket])  # type: ignore[misc]
            written.append(lanes.write_back([(host, part) for part, host in pairs(bucket)], worked))
    finally:
        lanes.finish()


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
    """The masters (float32) of `weights` (bfloat16) and `remainders` (int16), all of one shape."""
    bits = weights.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return bits.add_(remainders).view(torch.float32)


def stochastically_rounded(values: Tensor, generator: torch.Generator) -> Tensor:
    """`values` (float32, finite, contiguous, of any shape) in bfloat16, rounded up or down at random, right on average.

    An average that moves by less than half a unit in the last place, as Adam's moments do, would otherwise stand still.
    """
    noise = torch.empty(values.shape, dtype=torch.int32, device=values.device).random_(0, 1 << 16, generator=generator)
    return noise.add_(values.view(torch.int32)).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)
