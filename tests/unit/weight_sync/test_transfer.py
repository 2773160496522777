"""Transfer of weights: the buckets that are staged together, the sender over CUDA IPC, and calls to engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import RayActorError

from rljob_trainer.errors import WorkerLost
from rljob_trainer.weight_sync import colocated
from rljob_trainer.weight_sync.colocated import Staging, send_by_ipc
from rljob_trainer.weight_sync.transfer import EngineCalls, buckets, largest_unit_bytes, layout, packed, unit_of

# Division of parameters into pieces that are staged together, for both backends.


sizes = st.lists(st.integers(1, 40), min_size=1, max_size=30)
bucket_sizes = st.integers(1, 60)


def parameters(sizes: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """A parameter of each size in bytes, each in a module of its own."""
    return ((named(index), torch.zeros(size, dtype=torch.uint8)) for index, size in enumerate(sizes))


def named(index: int) -> str:
    return f"model.layers.{index}.mlp.up_proj.weight"


@given(sizes=sizes, bucket_bytes=bucket_sizes)
def test_buckets_hold_every_parameter_once_in_order_within_their_size(sizes: list[int], bucket_bytes: int) -> None:
    cut = list(buckets(parameters(sizes), bucket_bytes))
    assert [name for bucket in cut for name, _ in bucket] == [named(index) for index in range(len(sizes))]
    for bucket in cut:
        assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= bucket_bytes
    for bucket, following in pairwise(cut):
        assert sum(tensor.nbytes for _, tensor in bucket) + following[0][1].nbytes > bucket_bytes, "room was left"


@given(bucket_bytes=bucket_sizes)
def test_weights_that_the_engine_fuses_share_a_bucket(bucket_bytes: int) -> None:
    siblings = [
        f"model.layers.{layer}.{module}.weight"
        for layer in range(3)
        for module in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    ]
    sent = [(name, torch.zeros(7, dtype=torch.uint8)) for name in siblings]
    bucket_of = {name: number for number, bucket in enumerate(buckets(sent, bucket_bytes)) for name, _ in bucket}
    assert list(bucket_of) == siblings
    for name in siblings:
        assert bucket_of[name] == bucket_of[next(other for other in siblings if unit_of(other) == unit_of(name))]
    assert largest_unit_bytes((name, tensor.nbytes) for name, tensor in sent) == 3 * 7


@given(sizes=sizes)
def test_a_packed_bucket_is_cut_again_by_its_layout(sizes: list[int]) -> None:
    bucket = [(str(size), torch.randn(size, 2, dtype=torch.float64).to(torch.bfloat16)) for size in sizes]
    how = layout(bucket)
    assert how["dtype_names"] == ["bfloat16"] * len(sizes)
    parts = packed(bucket).split(how["tensor_sizes"])
    for (_, tensor), part, shape in zip(bucket, parts, how["shapes"], strict=True):
        assert torch.equal(part.view(torch.bfloat16).view(shape), tensor)


# The sender over CUDA IPC, with host memory instead of GPU memory: the contents behind each handle.


NAMES = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(4)]
PARAMETERS = [(name, torch.full((count,), float(count))) for name, count in zip(NAMES, (3, 5, 2, 9), strict=True)]


class ReadingEngines(EngineCalls):
    """Read each bucket as late as engines may, when they are waited for, from the memory that the policy names."""

    def __init__(self) -> None:
        super().__init__([])
        self.received: dict[str, torch.Tensor] = {}
        self.opened: list[int] = []
        self.kept: set[bool] = set()
        self._announced: deque[dict[str, Any]] = deque()

    def begin(self, method: str, *arguments: Any) -> None:
        self._announced += arguments

    def wait(self, *, until_left: int = 0) -> None:
        while len(self._announced) > until_left:
            update = self._announced.popleft()
            self.kept.add(update["is_kept"])
            self.opened.append(update["places"][0].data_ptr())
            for name, part, size in zip(update["names"], update["places"], update["tensor_sizes"], strict=True):
                assert part.nbytes == size
                self.received[name] = part.clone().view(torch.float32)


@pytest.fixture(autouse=True)
def host_memory_for_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device, **options: empty(*size, **options))
    monkeypatch.setattr(colocated, "shared", lambda tensors: {"places": list(tensors)})


@pytest.mark.parametrize("bucket_bytes", [36, 40, 1000])
def test_every_parameter_arrives_unchanged_through_buffers(bucket_bytes: int) -> None:
    engines = ReadingEngines()
    send_by_ipc(buckets(PARAMETERS, bucket_bytes), engines, Staging(bucket_bytes, is_kept=False))
    engines.wait()
    assert list(engines.received) == NAMES
    for name, tensor in PARAMETERS:
        assert torch.equal(engines.received[name], tensor)
    assert engines.kept == {False}


def test_two_buffers_are_filled_in_turn_in_every_sync() -> None:
    staging, engines = Staging(36, is_kept=True), ReadingEngines()
    for _ in range(3):
        send_by_ipc(buckets(PARAMETERS, 36), engines, staging)
    engines.wait()
    assert len(engines.opened) == 9
    assert len(set(engines.opened)) == 2
    assert all(before != after for before, after in pairwise(engines.opened))


def test_parameters_that_engines_can_open_are_read_where_they_are() -> None:
    engines = ReadingEngines()
    send_by_ipc([PARAMETERS], engines, None)
    engines.wait()
    assert engines.opened == [PARAMETERS[0][1].data_ptr()]
    assert engines.kept == {True}
    assert all(torch.equal(engines.received[name], tensor) for name, tensor in PARAMETERS)


def test_a_bucket_larger_than_its_buffer_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected a bucket of at most 35 bytes, found 36"):
        send_by_ipc(buckets(PARAMETERS, 36), ReadingEngines(), Staging(35, is_kept=False))


# Calls of the policy to engines, some of them lost.


def engine(name: str) -> Any:
    return SimpleNamespace(name=name, update_weights=SimpleNamespace(remote=lambda: f"call to {name}"))


def test_a_lost_engine_ends_the_wait_although_another_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NCCL, an engine that forwards weights to a lost one waits until the policy leaves the group."""

    def wait(calls: list[str], **_options: Any) -> tuple[list[str], list[str]]:
        return ["call to rollout-1"], [call for call in calls if call != "call to rollout-1"]

    def get(call: str) -> None:
        assert call == "call to rollout-1", "it waits for an engine that waits for the policy"
        raise RayActorError

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)
    calls = EngineCalls([engine("rollout-0"), engine("rollout-1")])
    calls.begin("update_weights")
    with pytest.raises(WorkerLost, match="rollout-1 died while receiving the weights") as lost:
        calls.wait()
    assert lost.value.actor == "rollout-1"
