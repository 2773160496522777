"""Streams arrays from host memory through a device, bucket after bucket.

While one bucket is worked on, the next is copied in and the one before it is copied out. At most `SLOTS` buckets are on
the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

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
