"""The state in pieces, so that the host memory for a checkpoint does not depend on the size of the model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from rljob_trainer.policy.float32_masters import joined
from rljob_trainer.policy.optimizer import MasterAdamW

WEIGHTS = "model."
"""Prefix of the weights' names in a checkpoint."""
PIECE_BYTES = 16 << 20
"""At most of one item in a file, if a row is not longer. A thread that writes or reads holds a few of them."""


class SaveInPieces(DefaultSavePlanner):
    """Cuts tensors along their first dimension. A piece is brought to host memory when it is written."""

    def __init__(self, optimizer: MasterAdamW, *, in_place: bool) -> None:
        """`in_place`: the state is where the optimizer has it, and split masters have a shape alone."""
        super().__init__()
        self._cuts: dict[tuple[str, torch.Size], tuple[MetadataIndex, slice]] = {}
        # Where they are now: weights that come back to the device meanwhile keep their copy in host memory.
        self._split: dict[str, tuple[Tensor, Tensor]] = {}
        if in_place:
            self._split = {
                f"{WEIGHTS}{name}": (optimizer.weights_of(name), optimizer.state_of(name)["remainders"])
                for name in optimizer.parameters
                if optimizer.is_split(name)
            }
        self._stream: torch.cuda.Stream | None = None
        if in_place and torch.cuda.is_available():
            # Beside the passes of the next step, which do not change the state.
            self._stream = torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[piece for item in plan.items for piece in self._cut(item)])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        index = write_item.index
        assert index.offset is not None, "the state consists of tensors"
        whole, rows = self._cuts.get((index.fqn, index.offset), (index, slice(None)))
        with torch.cuda.stream(self._stream):
            if index.fqn in self._split:
                weights, remainders = self._split[index.fqn]
                return joined(weights[rows].cpu(), remainders[rows].cpu())
            tensor: Tensor = self.lookup_object(whole)
            return (tensor[rows] if tensor.dim() else tensor).detach().cpu()

    def _cut(self, item: WriteItem) -> Iterator[WriteItem]:
        data = item.tensor_data
        assert data is not None, "the state consists of tensors"
        offsets, sizes = data.chunk.offsets, data.chunk.sizes
        row_bytes = math.prod(sizes[1:]) * data.properties.dtype.itemsize
        step = max(1, PIECE_BYTES // max(row_bytes, 1))
        if not sizes or sizes[0] <= step:
            yield item
            return
        for first in range(0, sizes[0], step):
            rows = slice(first, min(first + step, sizes[0]))
            at = torch.Size([offsets[0] + first, *offsets[1:]])
            self._cuts[item.index.fqn, at] = (item.index, rows)
            chunk = ChunkStorageMetadata(at, torch.Size([rows.stop - rows.start, *sizes[1:]]))
            yield WriteItem(
                MetadataIndex(item.index.fqn, at),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, data.properties, data.size),
            )


class LoadIntoOptimizer(DefaultLoadPlanner):
    """Loads masters of bfloat16 weights item by item, without a copy of all."""

    def __init__(self, optimizer: MasterAdamW) -> None:
        super().__init__()
        self._optimizer = optimizer

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        if self._is_split(read_item):
            return torch.empty(read_item.lengths, dtype=torch.float32)
        tensor: Tensor = super().resolve_tensor(read_item)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        if self._is_split(read_item):
            name = read_item.dest_index.fqn.removeprefix(WEIGHTS)
            self._optimizer.set_master(name, tensor, read_item.dest_offsets)

    def _is_split(self, read_item: ReadItem) -> bool:
        name = read_item.dest_index.fqn
        return name.startswith(WEIGHTS) and self._optimizer.is_split(name.removeprefix(WEIGHTS))
