"""Weights from safetensors files into a sharded model: each rank reads the rows of its own shards, and no others.

The model is built on the meta device, which has shapes but no memory, and sharded there. Its shards are then allocated
and filled in pieces. This takes host memory for a few pieces, regardless of the size of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rljob_client.errors import BadInput
from rljob_client.model_files import files_of_weights
from rljob_trainer.policy.gradients import local
from rljob_trainer.policy.optimizer_state import split

PIECE_ELEMENTS = 1 << 23
"""Numbers that are read at once; a longer row is read as a whole."""

READERS = 4
"""Threads: one alone waits for the disk. `rljob_memory.budget.host.READING_BYTES` follows from both."""


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within the block, modules are built with parameters on the meta device, and with real buffers.

    Buffers such as the frequencies of a rotary embedding are in no file: only the module that is built computes them.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:  # a tied one is on it already, and stays the same object
            param = nn.Parameter(param.data.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def load_weights(
    model: nn.Module,
    model_dir: Path,
    device: str,
    name_in_files: Callable[[str], str],
    remainders: dict[str, Tensor] | None = None,
) -> None:
    """Allocate the parameters that are on the meta device, in full shape or as shards, and fill them from the files.

    `name_in_files`: returns the name in the files of a parameter in `model`. `remainders`: by parameter, meta tensors
    for the remainders of masters whose parameters are bfloat16 (`optimizer_state.split`); replaced by the remainders,
    in host memory. Not collective. Raises `BadInput` if a file cannot be read, or has NaN or infinite weights.
    """
    remainders = {} if remainders is None else remainders
    files = files_of_weights(model_dir)
    pieces: list[Piece] = []
    places = _places(model)
    for name, parameter in list(model.named_parameters()):
        if parameter.device.type != "meta":
            continue
        allocated = nn.Parameter(torch.empty_like(parameter.detach(), device=device), parameter.requires_grad)
        for module, key in places[id(parameter)]:
            setattr(module, key, allocated)
        if name in remainders:
            remainders[name] = torch.empty(remainders[name].shape, dtype=remainders[name].dtype)
        weight = name_in_files(name)
        pieces += pieces_of(files[weight], weight, allocated, remainders.get(name))
    _fill(pieces)


def read_frozen_weights(
    models: Iterable[nn.Module], model_dir: Path, device: str, name_in_files: Callable[[str], str]
) -> None:
    """Fill the parameters on `device` that are not trained, with the values that `load_weights` has given them.

    `name_in_files`: see `load_weights`. Not collective. Raises `BadInput` if a file cannot be read.
    """
    files = files_of_weights(model_dir)
    names = [(name_in_files(name), each) for model in models for name, each in model.named_parameters()]
    frozen = [(name, each) for name, each in names if not each.requires_grad and local(each).device.type == device]
    _fill(piece for name, parameter in frozen for piece in pieces_of(files[name], name, parameter))


def _fill(pieces: Iterable[Piece]) -> None:
    with ThreadPoolExecutor(READERS, thread_name_prefix="weights") as readers:
        for _ in readers.map(fill_piece, pieces):
            pass


def rows_of(file: Path, weight: str, first: int, stop: int) -> Tensor:
    """[stop − first, …] Rows of a weight, in the dtype of the file. Raises `BadInput` if it cannot be read."""
    from safetensors import SafetensorError, safe_open

    # Opened for each piece: the pages of a file that is open stay mapped, and count as memory of the process.
    try:
        with safe_open(file, framework="pt") as tensors:
            values: Tensor = tensors.get_slice(weight)[first:stop]
            return values
    except (SafetensorError, OSError) as error:
        raise BadInput(f"cannot read {weight} in {file}: {error}; copy the file again") from error


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a weight, and the place that they are read to."""

    file: Path
    weight: str
    first: int
    """The first row, in the file."""
    target: Tensor
    remainder: Tensor | None


def _places(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """The modules that have each parameter, by its id: several for a tied one."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((module, key))
    return places


def pieces_of(file: Path, weight: str, parameter: Tensor, remainder: Tensor | None = None) -> Iterator[Piece]:
    """The local shard of a parameter, and its remainder of the same shape, in pieces of whole rows."""
    shard = local(parameter)
    begin = first_row(parameter)
    for start in range(0, len(shard), rows := max(1, PIECE_ELEMENTS * len(shard) // max(shard.numel(), 1))):
        stop = start + rows
        yield Piece(
            file, weight, begin + start, shard[start:stop], None if remainder is None else remainder[start:stop]
        )


def first_row(parameter: Tensor) -> int:
    """The first row of this rank's shard of a parameter, [rows, …]: FSDP2 divides rows like `torch.chunk`, which may
    leave none to some ranks."""
    if not isinstance(parameter, DTensor):
        return 0
    mesh = parameter.device_mesh
    shard = mesh.ndim - 1
    return -(-len(parameter) // mesh.size(shard)) * mesh.get_local_rank(shard)


def fill_piece(piece: Piece) -> None:
    """Read a piece to its place. Raises `BadInput` if the file cannot be read, or has NaN or infinite weights."""
    values = rows_of(piece.file, piece.weight, piece.first, piece.first + len(piece.target))
    if not is_finite(values):
        raise BadInput(
            f"expected finite weights, found NaN or infinity in {piece.weight} of {piece.file}: copy the file again, "
            "or use another model"
        )
    if piece.remainder is None:
        piece.target.copy_(values)
    else:
        weights, remainders = split(values.to(torch.float32))
        piece.target.copy_(weights)
        piece.remainder.copy_(remainders)


def is_finite(values: Tensor) -> bool:
    """True if no value of a tensor of any shape is NaN or infinite. One pass, without a copy."""
    if not values.numel() or values.dtype.itemsize == 1:  # torch has no extremes of float8 on a CPU
        return True
    return all(map(math.isfinite, values.aminmax()))


def require_finite(trained: Mapping[str, Tensor]) -> None:
    """Raise `BadInput` if a trained weight, of any shape, is NaN or infinite."""
    if found := [name for name, values in trained.items() if not is_finite(values)]:
        raise diverged(found, len(trained))


def diverged(not_finite: Sequence[str], tensors: int) -> BadInput:
    """The error for a trained model of so many `tensors`, some of which are not finite."""
    return BadInput(
        f"expected a trained model with finite weights, found NaN or infinity in {len(not_finite)} of {tensors} "
        f"tensors, such as {not_finite[0]}: the training has diverged. Start over in another output directory with a "
        "lower algorithm.learningRate"
    )
