"""State that passes through the device in buckets, and weights that leave it and come back."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from rljob_client.errors import BadInput
from rljob_trainer.policy import policy_offload
from rljob_trainer.policy.host_array import HostArray
from rljob_trainer.policy.optimizer_state import SLOTS, Copies, Lanes, stream_through
from rljob_trainer.policy.policy_offload import PolicyOffload

# Buckets that pass through a device in three queues are complete, in any order of the queues.


CPU = torch.device("cpu")


class ScrambledLanes(Lanes):
    """Queues as a GPU's streams are: nothing runs before `finish`, then any queue advances whose next item may run."""

    def __init__(self, seed: int) -> None:
        super().__init__(CPU)
        self._choice = random.Random(seed)
        self._queues: list[deque[tuple[int, int | None, Callable[[], None]]]] = [deque() for _ in range(3)]
        self._done: set[int] = set()
        self._items = 0

    def fetch(self, copies: Copies, after: Any) -> int:
        return self._enqueue(0, partial(super().fetch, copies, None), after)

    def compute(self, work: Callable[[], None], after: Any) -> int:
        return self._enqueue(1, work, after)

    def write_back(self, copies: Copies, after: Any) -> int:
        return self._enqueue(2, partial(super().write_back, copies, None), after)

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


def buckets_of(arrays: list[torch.Tensor], size: int) -> list[list[tuple[torch.Tensor, ...]]]:
    """Each part in two pieces."""
    halves = ([bucket.split(size // 2) for bucket in array.split(size)] for array in arrays if len(array))
    return [list(parts) for parts in zip(*halves, strict=True)]


@pytest.mark.parametrize("lanes", [Lanes(CPU), *(ScrambledLanes(seed) for seed in range(20))])
@pytest.mark.parametrize("elements", [0, 3, 10, 37])
def test_every_element_is_worked_on_once(lanes: Lanes, elements: int) -> None:
    first, second = torch.arange(elements, dtype=torch.float32), torch.ones(elements, dtype=torch.int16)
    expected = first * 2 + 1

    def work(_bucket: int, parts: list[torch.Tensor]) -> None:
        parts[0].mul_(2).add_(parts[1])
        parts[1].add_(1)

    stream_through(lanes, CPU, buckets_of([first, second], 4), work)
    assert torch.equal(first, expected)
    assert second.tolist() == [2] * elements


def test_at_most_three_buckets_are_on_the_device() -> None:
    storages: set[int] = set()
    stream_through(
        Lanes(CPU),
        CPU,
        buckets_of([torch.zeros(40)], 4),
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
        stream_through(Lanes(CPU), CPU, buckets_of([array], 4), work)
    assert array.tolist() == [1] * 4 + [0] * 8


# Weights that cannot leave the device, or not come back, are all where they were, and the next try succeeds.


CPU = torch.device("cpu")


class Model(nn.Module):
    """Trained weights in two types, one of them a view that begins within its memory, and frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        memory = torch.randn(7, 5, generator=draw)
        self.trained = nn.Parameter(memory[2:5])
        self.other = nn.Parameter(torch.randn(301, generator=draw).bfloat16())
        self.frozen = nn.Parameter(torch.randn(9, 3, generator=draw), requires_grad=False)


def values(model: nn.Module) -> dict[str, bytes]:
    return {
        name: each.detach().view(-1).view(torch.uint8).clone().numpy().tobytes()
        for name, each in model.named_parameters()
    }


def bytes_on_device(model: nn.Module) -> int:
    return sum(each.untyped_storage().nbytes() for each in model.parameters())


def test_copies_are_the_trained_shards_while_the_weights_are_away() -> None:
    model = Model()
    expected, trained = values(model), {name: each.detach().clone() for name, each in model.named_parameters()}
    offload = PolicyOffload([model], CPU)
    for _ in range(2):
        offload.offload()
        assert bytes_on_device(model) == 0
        assert offload.copies.keys() == {"trained", "other"}
        assert all(torch.equal(copy, trained[name]) for name, copy in offload.copies.items())
        offload.bring_back()
        assert values(model) == expected
        assert not offload.copies


@pytest.mark.parametrize("refused", [0, 1], ids=["trained", "frozen"])
def test_weights_stay_if_the_host_has_no_memory_for_them(monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    model, arrays = Model(), []

    class RefusingHost(HostArray):
        def __init__(self, elements: int, dtype: torch.dtype, **settings: Any) -> None:
            super().__init__(elements, dtype, **settings)
            arrays.append(self)

        @property
        def tensor(self) -> torch.Tensor:
            if arrays.index(self) == refused:
                raise RuntimeError("expected 15.3 GiB of host memory for the policy's weights")
            return super().tensor

    monkeypatch.setattr(policy_offload, "HostArray", RefusingHost)
    expected, offload = values(model), PolicyOffload([model], CPU)
    with pytest.raises(RuntimeError, match="host memory for the policy's weights"):
        offload.offload()
    assert not offload.offloaded
    assert not offload.copies
    assert values(model) == expected
    offload.offload()
    assert bytes_on_device(model) == 0
    offload.bring_back()
    assert values(model) == expected


def test_weights_stay_away_if_their_files_cannot_be_read() -> None:
    model = Model()
    expected, frozen = values(model), model.frozen.detach().clone()
    failures = [BadInput("cannot read model.safetensors: it ends too early; copy the file again")]

    def read() -> None:
        assert model.frozen.untyped_storage().nbytes()
        if failures:
            raise failures.pop()
        model.frozen.data.copy_(frozen)

    offload = PolicyOffload([model], CPU, read)
    offload.offload()
    with pytest.raises(BadInput):
        offload.bring_back()
    assert offload.offloaded
    assert bytes_on_device(model) == 0
    assert offload.copies.keys() == {"trained", "other"}, "a checkpoint reads them"
    offload.bring_back()
    assert values(model) == expected
