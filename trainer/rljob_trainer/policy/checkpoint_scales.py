"""The scales of moments in 8 bits, in a checkpoint.

Codes are saved as any tensor of a parameter's shape. Their scales belong to blocks of one rank's shard, so they are
saved by rank: a tensor of (ranks, blocks of the largest shard), in which each rank has a row. With the same number of
ranks, codes and scales are loaded bit for bit. With another, each element's scale is found by its place among the
former shards, and the numbers are quantized again, to the nearest codes, in the blocks of the new shards.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rljob_trainer.policy.moment_types import QuantizedType
from rljob_trainer.policy.optimizer import MasterAdamW
from rljob_trainer.policy.optimizer_state import QUANTIZED
from rljob_trainer.policy.quantized_moments import BLOCK, CHUNK, MOMENTS, Moment

SCALES: dict[Moment, str] = {moment: f"{moment}_scales" for moment in MOMENTS}
"""Names of the scales, in `MasterAdamW.state_of` and in a checkpoint."""


def row_of(scales: Tensor, parameter: Tensor) -> Tensor:
    """This rank's row of the scales of one moment of a parameter, in host memory. A copy, padded with zeros."""
    row = torch.zeros((1, _blocks(parameter)))
    row[0, : scales.numel()].copy_(scales)
    return row


def placed_row(row: Tensor, parameter: Tensor, cpu_mesh: DeviceMesh | None) -> Tensor:
    """`row` as this rank's part of the rows of all ranks. `cpu_mesh`: of the ranks, if the parameter is sharded."""
    if cpu_mesh is None:
        return row
    shape = torch.Size((_ranks(parameter), row.shape[1]))
    return DTensor.from_local(row, cpu_mesh, [Shard(0)], run_check=False, shape=shape, stride=(row.shape[1], 1))


def foreign_rows(
    optimizer: MasterAdamW, sizes: Mapping[str, torch.Size], prefix: str
) -> dict[tuple[str, Moment], Tensor]:
    """Empty tensors for the rows of all ranks that wrote a checkpoint, by parameter and moment.

    None for a parameter if as many ranks load it: each needs its own row alone. `sizes`: of the tensors in the
    checkpoint, by name; those of the optimizer's state begin with `prefix`.
    """
    if optimizer.moments.dtype != QUANTIZED:
        return {}
    return {
        (name, moment): torch.empty(size)
        for name, parameter in optimizer.parameters.items()
        for moment, key in SCALES.items()
        if (size := sizes[f"{prefix}{name}.{key}"]) != (_ranks(parameter), _blocks(parameter))
    }


def take_scales(
    optimizer: MasterAdamW, values: Mapping[str, Mapping[str, Tensor]], foreign: Mapping[tuple[str, Moment], Tensor]
) -> None:
    """Complete the state, whose codes have been loaded, with this rank's rows in `values`, or with `foreign_rows`."""
    for name, each in values.items():
        for moment, key in SCALES.items():
            if (name, moment) in foreign:
                _requantize(optimizer, name, moment, foreign[name, moment])
            elif key in each:
                scales = optimizer.state_of(name)[key]
                scales.copy_(each[key][0, : scales.numel()])


def _requantize(optimizer: MasterAdamW, name: str, moment: Moment, rows: Tensor) -> None:
    """Quantize the loaded codes of a parameter's moment again, for the blocks of this rank's shard.

    `rows`: the scales of all ranks of the writers.
    """
    assert isinstance(optimizer.moments, QuantizedType)
    quantizer = optimizer.moments.quantizer
    state, parameter = optimizer.state_of(name), optimizer.parameters[name]
    codes, scales = state[moment].view(-1), state[SCALES[moment]]
    first = _first_element(parameter)
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
    return parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1


def _blocks(parameter: Tensor) -> int:
    """Of the largest shard."""
    return -(-_shard_elements(parameter, _ranks(parameter)) // BLOCK)


def _shard_elements(parameter: Tensor, ranks: int) -> int:
    """Elements of the largest of `ranks` shards: FSDP2 divides the first dimension, rounded up, as `torch.chunk`."""
    if not parameter.dim():
        return 1
    rows: int = parameter.shape[0]
    return -(-rows // ranks) * (parameter.numel() // max(rows, 1))


def _first_element(parameter: Tensor) -> int:
    """Place of this rank's first element in the whole parameter."""
    rank = parameter.device_mesh.get_local_rank() if isinstance(parameter, DTensor) else 0
    return rank * _shard_elements(parameter, _ranks(parameter))
