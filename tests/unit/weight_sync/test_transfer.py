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
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import RayActorError

from rljob_trainer.errors import WorkerLost
from rljob_trainer.weight_sync import colocated
from rljob_trainer.weight_sync.colocated import ReservedBuffer, send_by_ipc
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
    """Read each bucket as late as engines may, when they are waited for: the first bytes behind the handle."""

    def __init__(self) -> None:
        super().__init__([])
        self.received: dict[str, torch.Tensor] = {}
        self.opened: list[int] = []
        self._announced: deque[dict[str, Any]] = deque()

    def begin(self, method: str, *arguments: Any) -> None:
        self._announced += arguments

    def wait(self, *, until_left: int = 0) -> None:
        while len(self._announced) > until_left:
            update = self._announced.popleft()
            [(buffer,)] = update["ipc_handles"].values()
            self.opened.append(buffer.data_ptr())
            parts = buffer[: sum(update["tensor_sizes"])].split(update["tensor_sizes"])
            for name, part in zip(update["names"], parts, strict=True):
                self.received[name] = part.clone().view(torch.float32)


@pytest.fixture(autouse=True)
def host_memory_for_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device, **options: empty(*size, **options))
    monkeypatch.setattr(torch.cuda, "current_stream", torch.cpu.current_stream)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(torch.cpu.Stream, "synchronize", lambda _self: None, raising=False)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(colocated, "_handle", lambda buffer: (buffer,))
    monkeypatch.setattr(colocated, "_handles_by_gpu", lambda handle: {"GPU-0": handle})


def send(engines: EngineCalls, bucket_bytes: int, reserved: ReservedBuffer | None) -> None:
    for bucket in buckets(PARAMETERS, bucket_bytes):
        send_by_ipc(bucket, engines, reserved)


@pytest.mark.parametrize("bucket_bytes", [36, 40, 1000])
@pytest.mark.parametrize("reserves", [False, True], ids=["fresh buffers", "reserved buffer"])
def test_every_parameter_arrives_unchanged(bucket_bytes: int, reserves: bool) -> None:
    engines = ReadingEngines()
    send(engines, bucket_bytes, ReservedBuffer(bucket_bytes) if reserves else None)
    engines.wait()
    assert list(engines.received) == NAMES
    for name, tensor in PARAMETERS:
        assert torch.equal(engines.received[name], tensor)


def test_a_reserved_buffer_is_the_same_memory_in_every_sync() -> None:
    buffer, engines = ReservedBuffer(36), ReadingEngines()
    for _ in range(3):
        send(engines, 36, buffer)
    assert len(engines.opened) == 9
    assert len(set(engines.opened)) == 1


def test_a_bucket_larger_than_the_reserved_buffer_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected a bucket of at most 35 bytes, found 36"):
        send(ReadingEngines(), 36, ReservedBuffer(35))


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
