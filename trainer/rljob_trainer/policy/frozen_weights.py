"""Weights that are not trained, from the model's files again: bytes as they are stored, at the speed of memory.

For files in the page cache or in memory (`policy_offload`). `weight_loading` reads each piece through a mapping of its
file, page by page; here a piece is one system call into memory that a GPU copies from.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rljob_client.errors import BadInput
from rljob_client.model_files import files_of_weights
from rljob_trainer.policy.gradients import local
from rljob_trainer.policy.weight_loading import Piece, fill_piece, pieces_of

_READERS = 8
"""Threads: each is bound by the speed at which one core copies memory."""

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Of torch, by the name in a safetensors header."""


def read_frozen_weights(
    models: Iterable[nn.Module], model_dir: Path, device: str, name_in_files: Callable[[str], str]
) -> None:
    """Fill the parameters on `device` that are not trained, with the values that `load_weights` has given them.

    `name_in_files`: of a parameter by its name in its model. Not collective. Raises `BadInput` if a file cannot be
    read.
    """
    reader = _Reader()
    with ThreadPoolExecutor(_READERS, thread_name_prefix="weights") as readers:
        for _ in readers.map(reader.fill, _frozen_pieces(models, files_of_weights(model_dir), device, name_in_files)):
            pass


def _frozen_pieces(
    models: Iterable[nn.Module], files: dict[str, Path], device: str, name_in_files: Callable[[str], str]
) -> Iterator[Piece]:
    for model in models:
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad and local(parameter).device.type == device:
                weight = name_in_files(name)
                yield from pieces_of(files[weight], weight, parameter)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A weight in a file."""

    dtype: torch.dtype | None
    """None: another than `_DTYPES` has."""
    begin: int
    """Of its first row in the file, in bytes."""
    row_elements: int


@dataclass(slots=True)
class _Reader:
    """Reads pieces in several threads, each with its own buffer."""

    _headers: dict[Path, dict[str, _Stored]] = field(default_factory=dict)
    _own: threading.local = field(default_factory=threading.local)

    def fill(self, piece: Piece) -> None:
        """Read a piece to its place, which has it when the call returns."""
        stored = self._stored(piece)
        if stored.dtype != piece.target.dtype or not piece.target.numel():
            fill_piece(piece)
            return
        nbytes = piece.target.nbytes
        buffer = self._buffer(nbytes, pinned=piece.target.is_cuda)
        row_bytes = stored.row_elements * piece.target.itemsize
        _read(piece.file, stored.begin + piece.first * row_bytes, buffer.numpy().data[:nbytes])
        piece.target.copy_(buffer[:nbytes].view(piece.target.dtype).view(piece.target.shape), non_blocking=True)
        if piece.target.is_cuda:
            torch.cuda.current_stream(piece.target.device).synchronize()  # the next piece overwrites the buffer

    def _stored(self, piece: Piece) -> _Stored:
        if piece.file not in self._headers:
            self._headers[piece.file] = _header(piece.file)
        return self._headers[piece.file][piece.weight]

    def _buffer(self, nbytes: int, *, pinned: bool) -> Tensor:
        buffer: Tensor | None = getattr(self._own, "buffer", None)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._own.buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        return buffer


def _header(file: Path) -> dict[str, _Stored]:
    """The weights in a safetensors file: 8 bytes with the length of a header in JSON, the header, the values."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        return {
            name: _Stored(
                _DTYPES.get(each["dtype"]), 8 + length + each["data_offsets"][0], math.prod(each["shape"][1:])
            )
            for name, each in header.items()
        }
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"cannot read {file}: {error}; copy the file again") from error


def _read(file: Path, begin: int, into: memoryview) -> None:
    try:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            done = 0
            while done < len(into):
                read = os.preadv(descriptor, [into[done:]], begin + done)
                if read == 0:
                    raise OSError("it ends too early")
                done += read
        finally:
            os.close(descriptor)
    except OSError as error:
        raise BadInput(f"cannot read {file}: {error}; copy the file again") from error
