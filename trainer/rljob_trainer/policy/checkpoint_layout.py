"""The layout of a policy's state in a checkpoint: pieces of tensors, and the scales of moments in 8 bits.

Tensors are in pieces, so that the host memory for a checkpoint does not depend on the size of the model.

Codes are saved as any tensor of a parameter's shape. Their scales belong to blocks of one rank's shard, so they are
saved by rank: a tensor of (ranks, blocks of the largest shard), in which each rank has a row. With the same number of
ranks, codes and scales are loaded bit for bit. With another, each element's scale is found by its place among the
former shards, and the numbers are quantized again, to the nearest codes, in the blocks of the new shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rljob_trainer.policy.gradients import local
from rljob_trainer.policy.moments import CHUNK, MOMENTS, Moment, QuantizedType
from rljob_trainer.policy.optimizer import MasterAdamW
from rljob_trainer.policy.optimizer_state import BLOCK, joined, split
from rljob_trainer.policy.weight_loading import first_row

WEIGHTS = "model."
"""Prefix of the weights' names in a checkpoint."""
PIECE_BYTES = 16 << 20
"""Maximum size of one item in a file, unless a row is larger. A thread that writes or reads holds a few items."""


STATE = "optimizer.state."
"""Prefix of the names of the optimizer's state."""
SCALES: dict[Moment, str] = {moment: f"{moment}_scales" for moment in MOMENTS}
"""Names of the scales, in `MasterAdamW.state_of` and in a checkpoint."""

LocalState = dict[str, dict[str, Tensor]]
"""This rank's part of the state, by parameter: `weights` and the tensors of `MasterAdamW.state_of`."""


def local_state(optimizer: MasterAdamW) -> LocalState:
    """The state where it is now: weights that return to the device later keep their copy in host memory."""
    return {name: {"weights": optimizer.weights_of(name), **optimizer.state_of(name)} for name in optimizer.parameters}


def as_saved(optimizer: MasterAdamW, state: LocalState) -> dict[str, Any]:
    """The state by the names that it has in a checkpoint. Shares its memory, except for copies of scales.

    The master of a bfloat16 weight has a shape alone: `SaveInPieces` and `LoadIntoState` join and split its pieces.
    """
    cpu_meshes: dict[DeviceMesh, DeviceMesh] = {}

    def placed(shard: Tensor, parameter: Tensor, shape: torch.Size | None = None) -> Tensor:
        """`shard` as this rank's part of a tensor of `shape`, by default that of the parameter."""
        if not isinstance(parameter, DTensor):
            return shard
        mesh, whole = parameter.device_mesh, shape or parameter.shape
        if shard.device.type != mesh.device_type:
            if mesh not in cpu_meshes:
                cpu_meshes[mesh] = DeviceMesh("cpu", mesh.mesh, _init_backend=False)
            mesh = cpu_meshes[mesh]
        stride = torch.empty(whole, device="meta").stride()
        return DTensor.from_local(shard, mesh, parameter.placements, run_check=False, shape=whole, stride=stride)

    model: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    for name, parameter in optimizer.parameters.items():
        each = state[name]
        is_split = "remainders" in each
        master = torch.empty((), dtype=torch.float32).expand(each["weights"].shape) if is_split else each["weights"]
        model[name] = placed(master, parameter)
        moments[name] = {moment: placed(each[moment], parameter) for moment in MOMENTS}
        moments[name]["step"] = torch.tensor(float(optimizer.steps))
        for key in (key for key in SCALES.values() if key in each):
            row = torch.zeros((1, _blocks(parameter)))
            row[0, : each[key].numel()].copy_(each[key])
            moments[name][key] = placed(row, parameter, torch.Size((_ranks(parameter), row.shape[1])))
    return {"model": model, "optimizer": {"state": moments}}


class SaveInPieces(DefaultSavePlanner):
    """Cuts tensors along their first dimension. A piece is brought to host memory when it is written."""

    def __init__(self, state: LocalState, *, in_place: bool) -> None:
        """`in_place`: the state is where the optimizer has it."""
        super().__init__()
        self._cuts: dict[tuple[str, torch.Size], tuple[MetadataIndex, slice]] = {}
        self._split = {
            f"{WEIGHTS}{name}": (each["weights"], each["remainders"])
            for name, each in state.items()
            if "remainders" in each
        }
        self._stream: torch.cuda.Stream | None = None
        if in_place and torch.cuda.is_available():
            # Concurrent with the passes of the next step, which do not change the state.
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


class LoadIntoState(DefaultLoadPlanner):
    """Loads masters of bfloat16 weights item by item, without a copy of all."""

    def __init__(self, state: LocalState) -> None:
        super().__init__()
        self._split = {f"{WEIGHTS}{name}": each for name, each in state.items() if "remainders" in each}

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        if read_item.dest_index.fqn in self._split:
            return torch.empty(read_item.lengths, dtype=torch.float32)
        tensor: Tensor = super().resolve_tensor(read_item)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        if (state := self._split.get(read_item.dest_index.fqn)) is not None:
            ranges = zip(read_item.dest_offsets, read_item.lengths, strict=True)
            box = tuple(slice(start, start + length) for start, length in ranges)
            for target, values in zip((state["weights"], state["remainders"]), split(tensor), strict=True):
                target[box].copy_(values)


def receive_scales(optimizer: MasterAdamW, state: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Make room in `state` for the rows of all ranks that wrote a checkpoint, unless as many ranks load it: each needs
    its own row alone then. `saved`: metadata of the tensors in the checkpoint, by name."""
    for name, each in state.items():
        for key in SCALES.values():
            if key in each and (size := saved[f"{STATE}{name}.{key}"].size) != each[key].shape:
                each[key] = torch.empty(size)


def take_scales(optimizer: MasterAdamW, state: Mapping[str, Any]) -> None:
    """Complete the optimizer's state, whose codes have been loaded, with the scales in `state`."""
    for name, parameter in optimizer.parameters.items():
        for moment, key in SCALES.items():
            if (rows := state[name].get(key)) is None:
                continue
            if rows.shape == (_ranks(parameter), _blocks(parameter)):
                scales = optimizer.state_of(name)[key]
                scales.copy_(local(rows)[0, : scales.numel()])
            else:
                _requantize(optimizer, name, moment, rows)


def _requantize(optimizer: MasterAdamW, name: str, moment: Moment, rows: Tensor) -> None:
    """Quantize the loaded codes of a parameter's moment again, for the blocks of this rank's shard.

    `rows`: the scales of all ranks of the writers.
    """
    quantizer = optimizer.moments
    assert isinstance(quantizer, QuantizedType)
    state, parameter = optimizer.state_of(name), optimizer.parameters[name]
    codes, scales = state[moment].view(-1), state[SCALES[moment]]
    first = first_row(parameter) * math.prod(parameter.shape[1:])
    written_by_one = _shard_elements(parameter, len(rows))
    for start in range(0, codes.numel(), CHUNK):
        piece = codes[start : start + CHUNK]
        places = torch.arange(first + start, first + start + piece.numel())
        former = rows[places // written_by_one, places % written_by_one // BLOCK].to(quantizer.device)
        values = torch.zeros(-(-piece.numel() // BLOCK) * BLOCK, device=quantizer.device)
        values[: piece.numel()] = quantizer.values_of(moment, piece.to(quantizer.device)) * former
        new_codes, new_scales = quantizer.quantize(moment, values)
        piece.copy_(new_codes[: piece.numel()])
        scales[start // BLOCK :][: new_scales.numel()].copy_(new_scales)


def _ranks(parameter: Tensor) -> int:
    """Ranks that share a copy of the state."""
    mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
    return mesh.size(mesh.ndim - 1) if mesh else 1


def _blocks(parameter: Tensor) -> int:
    """Number of blocks of the largest shard."""
    return -(-_shard_elements(parameter, _ranks(parameter)) // BLOCK)


def _shard_elements(parameter: Tensor, ranks: int) -> int:
    """Elements of the largest of `ranks` shards: FSDP2 divides the first dimension, rounded up, as `torch.chunk`."""
    if not parameter.dim():
        return 1
    rows: int = parameter.shape[0]
    return -(-rows // ranks) * (parameter.numel() // max(rows, 1))
