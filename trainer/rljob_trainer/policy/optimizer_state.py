"""AdamW's moments and the remainders of the masters: flat arrays on the device, or streamed from host memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

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
    """The state of one rank's parameters, in their order: of the first ones on the device, of the others in host
    memory.

    `starts`: position of each parameter's first element, and the end; whole blocks if `moments` is `QUANTIZED`.
    `moments`: dtype of both moments; `QUANTIZED`: codes with scales. `split`: some weights are bfloat16, with
    remainders (see `split`). `offload`: share of the elements in host memory, from 0 to 1. It is rounded up to whole
    parameters.
    """

    def __init__(
        self, starts: Sequence[int], device: torch.device, moments: torch.dtype, *, split: bool, offload: float
    ):
        self._starts, self._device = starts, device
        self._dtypes = {"exp_avg": moments, "exp_avg_sq": moments}
        if split:
            self._dtypes["remainders"] = torch.int16
        if moments == QUANTIZED:
            self._dtypes |= {"exp_avg_scales": torch.float32, "exp_avg_sq_scales": torch.float32}
        self._lanes = Lanes(device)
        cut = self._cut(offload)
        self._halves = _Halves(cut, self._device_arrays(cut), self._host_arrays(cut))

    @property
    def offloaded(self) -> bool:
        """Part of the state, or all of it, is in host memory."""
        return self._halves.cut < self._elements

    @property
    def on_device(self) -> bool:
        """Part of the state, or all of it, is on the device."""
        return self._halves.cut > 0

    @property
    def nbytes(self) -> int:
        return sum(entries(name, self._all).stop * dtype.itemsize for name, dtype in self._dtypes.items())

    def of(self, elements: slice) -> State:
        """The state of some elements, where it is: all of them on the device, or all in host memory."""
        return {name: piece for name in self._dtypes for piece in self._halves.pieces(name, elements)}

    def arrays(self) -> State:
        """The whole state, if it is in one place."""
        return self.of(self._all)

    def offload(self, share: float) -> None:
        """Move the state so that `share` of it is in host memory.

        Nothing has changed after an error of a lack of memory. A device that gives up state never holds more than
        before: a failure may have filled it.
        """
        former, cut = self._halves, self._cut(share)
        if cut == former.cut:
            return
        new = _Halves(cut, self._device_arrays(cut) if cut > former.cut else {}, self._host_arrays(cut))
        moved = [slice(*ends) for ends in pairwise(sorted({cut, former.cut, self._elements}))]
        targets = {name: [new.pieces(name, part)[0] for part in moved] for name in self._dtypes}
        for name in self._dtypes:
            for part, target in zip(moved, targets[name], strict=True):
                [source] = former.pieces(name, part)
                target.copy_(source)
            of_both = entries(name, slice(0, min(cut, former.cut)))
            if cut > former.cut:
                new.on_device[name][of_both] = former.on_device[name]
            else:
                kept = former.on_device.pop(name)[of_both].cpu()
                new.on_device[name] = kept.to(self._device)
        self._halves = new

    def each(self, buckets: Sequence[slice], work: Callable[[int, State], None]) -> None:
        """Call `work` for each bucket, with its state on the device."""
        parts = [[self._halves.pieces(name, bucket) for name in self._dtypes] for bucket in buckets]
        kept = sum(bucket.stop <= self._halves.cut for bucket in buckets)
        streamed = len(buckets) - kept

        def work_on(number: int, on_device: Sequence[Tensor]) -> None:
            work(number, dict(zip(self._dtypes, on_device, strict=True)))

        def work_on_kept(numbers: range) -> None:
            for number in numbers:
                work_on(number, [piece for [piece] in parts[number]])

        def work_on_streamed(number: int, on_device: Sequence[Tensor]) -> None:
            work_on(kept + number, on_device)
            # Those on the device take turns with those that arrive, so that copies hide them.
            work_on_kept(range(kept * number // streamed, kept * (number + 1) // streamed))

        if streamed:
            stream_through(self._lanes, self._device, parts[kept:], work_on_streamed)
        else:
            work_on_kept(range(kept))

    @property
    def _elements(self) -> int:
        return self._starts[-1]

    @property
    def _all(self) -> slice:
        return slice(0, self._elements)

    def _cut(self, share: float) -> int:
        most = self._elements - math.ceil(share * self._elements)
        return max(start for start in self._starts if start <= most)

    def _host_arrays(self, cut: int) -> dict[str, HostArray]:
        """Zeros for the elements from `cut` on."""
        return {
            name: HostArray(
                entries(name, slice(cut, self._elements)).stop - entries(name, slice(0, cut)).stop,
                dtype,
                pinned=self._device.type == "cuda",
                purpose="the optimizer's state",
                advice="write memory.optimizerOffload: Disabled",
            )
            for name, dtype in self._dtypes.items()
        }

    def _device_arrays(self, cut: int) -> dict[str, Tensor]:
        """Zeros for the elements before `cut`."""
        return {
            name: torch.zeros(entries(name, slice(0, cut)).stop, dtype=dtype, device=self._device)
            for name, dtype in self._dtypes.items()
        }


@dataclass(frozen=True, slots=True)
class _Halves:
    """Arrays by name: of the elements before `cut`, and of the others."""

    cut: int
    on_device: dict[str, Tensor]
    on_host: dict[str, HostArray]

    def pieces(self, name: str, elements: slice) -> list[Tensor]:
        """The entries of a range of elements: in one piece, or in two if `cut` lies within the range."""
        found, cut = entries(name, elements), entries(name, slice(0, self.cut)).stop
        pieces = []
        if found.start < cut or found.start == found.stop:
            pieces.append(self.on_device[name][found.start : min(found.stop, cut)])
        if found.stop > cut and found.start < found.stop:
            pieces.append(self.on_host[name].tensor[max(found.start - cut, 0) : found.stop - cut])
        return pieces


SLOTS = 3
"""One bucket arrives, one is worked on, one leaves."""

Copies = Sequence[tuple[Tensor, Tensor]]
"""Pairs of target and source."""


class Lanes:
    """Three concurrent queues of a device: a stream for each direction of copies, made once, since torch keeps memory
    apart for each stream, and the current stream for work. Each runs its items in order; an item waits for the event
    `after`. On a CPU, which has no queues, an item is complete when its call returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._device: Any = torch.get_device_module(device)
        self._in, self._out = self._device.Stream(), self._device.Stream()

    def fetch(self, copies: Copies, after: Any) -> Any:
        """Copy to the device. Returns the event of its completion."""
        # Without an event the slot is new: its memory may still be in use by earlier work.
        return self._copied_on(self._in, copies, after or self._device.current_stream().record_event())

    def compute(self, work: Callable[[], None], after: Any) -> Any:
        """Run `work` on the device."""
        self._device.current_stream().wait_event(after)
        work()
        return self._device.current_stream().record_event()

    def write_back(self, copies: Copies, after: Any) -> Any:
        """Copy to the host."""
        return self._copied_on(self._out, copies, after)

    def finish(self) -> None:
        """Return when all items are complete, also after an error."""
        self._device.synchronize()

    def _copied_on(self, stream: Any, copies: Copies, after: Any) -> Any:
        with self._device.stream(stream):
            stream.wait_event(after)
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            return stream.record_event()


def stream_through(
    lanes: Lanes,
    device: torch.device,
    buckets: Sequence[Sequence[Sequence[Tensor]]],
    work: Callable[[int, list[Tensor]], None],
) -> None:
    """Call `work(bucket, parts)` for each bucket, with its parts on `device`, and keep what it writes.

    While one bucket is worked on, the next is copied in and the one before it is copied out. At most `SLOTS` buckets
    are on the device.

    `buckets`: the parts of each, and the pieces of each part, [elements], in host memory or on the device; part i
    has the same dtype in all buckets. Returns when they hold the results. After an error, the buckets before the
    failing one may have changed; the others have not.
    """
    slots = [
        [
            torch.empty(max(sum(map(len, part)) for part in parts), dtype=parts[0][0].dtype, device=device)
            for parts in zip(*buckets, strict=True)
        ]
        for _ in range(min(SLOTS, len(buckets)))
    ]
    fetched: list[Any] = []
    written: list[Any] = []

    def on_device(bucket: int) -> list[Tensor]:
        slot = slots[bucket % len(slots)]
        return [array[: sum(map(len, part))] for array, part in zip(slot, buckets[bucket], strict=True)]

    def pairs(bucket: int) -> list[tuple[Tensor, Tensor]]:
        """The pieces of a bucket in its slot, and where they are kept."""
        return [
            pair
            for whole, part in zip(on_device(bucket), buckets[bucket], strict=True)
            for pair in zip(whole.split([len(piece) for piece in part]), part, strict=True)
        ]

    try:
        for bucket in range(len(buckets)):
            while len(fetched) < min(bucket + len(slots), len(buckets)):
                previous = len(fetched) - len(slots)
                fetched.append(lanes.fetch(pairs(len(fetched)), written[previous] if previous >= 0 else None))
            worked = lanes.compute(partial(work, bucket, on_device(bucket)), fetched[bucket])
            written.append(lanes.write_back([(kept, piece) for piece, kept in pairs(bucket)], worked))
    finally:
        lanes.finish()


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
