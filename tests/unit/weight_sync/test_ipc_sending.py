"""The sender over CUDA IPC, with host memory instead of GPU memory: the contents behind each handle."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rljob_trainer.weight_sync import ipc
from rljob_trainer.weight_sync.transfer import EngineCalls

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
    monkeypatch.setattr(ipc, "_handle", lambda buffer: (buffer,))
    monkeypatch.setattr(ipc, "_handles_by_gpu", lambda handle: {"GPU-0": handle})


@pytest.mark.parametrize("bucket_bytes", [36, 40, 1000])
@pytest.mark.parametrize("reserves", [False, True], ids=["fresh buffers", "reserved buffer"])
def test_every_parameter_arrives_unchanged(bucket_bytes: int, reserves: bool) -> None:
    engines = ReadingEngines()
    ipc.send(PARAMETERS, engines, bucket_bytes, ipc.ReservedBuffer(bucket_bytes) if reserves else None)
    engines.wait()
    assert list(engines.received) == NAMES
    for name, tensor in PARAMETERS:
        assert torch.equal(engines.received[name], tensor)


def test_a_reserved_buffer_is_the_same_memory_in_every_sync() -> None:
    buffer, engines = ipc.ReservedBuffer(36), ReadingEngines()
    for _ in range(3):
        ipc.send(PARAMETERS, engines, 36, buffer)
    assert len(engines.opened) == 9
    assert len(set(engines.opened)) == 1


def test_a_bucket_larger_than_the_reserved_buffer_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected a bucket of at most 35 bytes, found 36"):
        ipc.send(PARAMETERS, ReadingEngines(), 36, ipc.ReservedBuffer(35))
