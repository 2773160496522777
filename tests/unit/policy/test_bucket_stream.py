"""Buckets that pass through a device in three queues are complete, in whatever order the queues advance."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rljob_trainer.policy.bucket_stream import SLOTS, Copies, InOrder, Lanes, stream_through

CPU = torch.device("cpu")


class ScrambledLanes:
    """Queues as a GPU's streams are: nothing runs before `finish`, then any queue advances whose next item may run."""

    def __init__(self, seed: int) -> None:
        self._choice = random.Random(seed)
        self._queues: list[deque[tuple[int, int | None, Callable[[], None]]]] = [deque() for _ in range(3)]
        self._done: set[int] = set()
        self._items = 0

    def fetch(self, copies: Copies, after: Any) -> int:
        return self._enqueue(0, lambda: InOrder().fetch(copies, None), after)

    def compute(self, work: Callable[[], None], after: Any) -> int:
        return self._enqueue(1, work, after)

    def write_back(self, copies: Copies, after: Any) -> int:
        return self._enqueue(2, lambda: InOrder().write_back(copies, None), after)

    def finish(self) -> None:
        while any(self._queues):
            ready = [queue for queue in self._queues if queue and (queue[0][1] is None or queue[0][1] in self._done)]
            number, _, item = self._choice.choice(ready).popleft()
            item()
            self._done.add(number)

    def _enqueue(self, queue: int, item: Callable[[], None], after: int | None) -> int:
        self._items += 1
        self._queues[queue].append((self._items, after, item))
        return self._items


def buckets_of(elements: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, elements)) for start in range(0, elements, size)]


@pytest.mark.parametrize("lanes", [InOrder(), *(ScrambledLanes(seed) for seed in range(20))])
@pytest.mark.parametrize("elements", [0, 3, 10, 37])
def test_every_element_is_worked_on_once(lanes: Lanes, elements: int) -> None:
    first, second = torch.arange(elements, dtype=torch.float32), torch.ones(elements, dtype=torch.int16)
    expected = first * 2 + 1

    def work(_bucket: int, parts: list[torch.Tensor]) -> None:
        parts[0].mul_(2).add_(parts[1])
        parts[1].add_(1)

    stream_through(lanes, CPU, [first, second], buckets_of(elements, 4), work)
    assert torch.equal(first, expected)
    assert second.tolist() == [2] * elements


def test_at_most_three_buckets_are_on_the_device() -> None:
    storages: set[int] = set()
    stream_through(
        InOrder(),
        CPU,
        [torch.zeros(40)],
        buckets_of(40, 4),
        lambda _bucket, parts: storages.add(parts[0].untyped_storage().data_ptr()),
    )
    assert len(storages) == SLOTS


def test_a_failing_bucket_leaves_those_after_it_unchanged() -> None:
    array = torch.zeros(12)

    def work(bucket: int, parts: list[torch.Tensor]) -> None:
        if bucket == 1:
            raise torch.OutOfMemoryError("CUDA out of memory (made up)")
        parts[0].add_(1)

    with pytest.raises(torch.OutOfMemoryError):
        stream_through(InOrder(), CPU, [array], buckets_of(12, 4), work)
    assert array.tolist() == [1] * 4 + [0] * 8
