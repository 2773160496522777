"""Another process on the GPU reads tensors where they are, and closes what it has opened."""

from __future__ import annotations

from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from rljob_client.errors import RunError
from rljob_trainer.policy.caching_allocator import ExpandableSegments
from rljob_trainer.weight_sync.cuda_ipc import OpenedMemory, shared

pytestmark = pytest.mark.gpu


def read(pipe: Connection) -> None:
    """Send the sums of the tensors at the places that arrive, as int16, and close them on the way to the next."""
    memory = OpenedMemory()
    while (update := pipe.recv()) is not None:
        parts = memory.parts(update["handles"], update["places"], update["sizes"])
        pipe.send([int(part.view(torch.int16).sum(dtype=torch.int64)) for part in parts])
        torch.cuda.synchronize()
        memory.close(update["kept"])
    pipe.send(len(memory._addresses))


def test_another_process_reads_what_is_written_between_its_looks() -> None:
    here, there = get_context("spawn").Pipe()
    reader = get_context("spawn").Process(target=read, args=(there,), daemon=True)
    reader.start()
    tensors = [torch.zeros(size, dtype=torch.int16, device="cuda") for size in (1000, 3_000_000, 40_000_000, 7)]
    for number, keeps in enumerate([True, True, False], 1):
        for tensor in tensors:
            tensor.fill_(number)
        place: dict[str, Any] = shared(tensors)
        here.send(place | {"sizes": [each.nbytes for each in tensors], "kept": place["handles"] if keeps else []})
        assert here.recv() == [number * len(each) for each in tensors]
    here.send(None)
    assert here.recv() == 0
    reader.join(timeout=30)


def test_memory_in_expandable_segments_is_refused() -> None:
    segments = ExpandableSegments()
    torch.cuda.empty_cache()
    segments.enable()
    try:
        tensor = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
        with pytest.raises(RunError, match="expected to share GPU memory between policy and engine"):
            shared([tensor])
    finally:
        segments.disable()
