"""Random weights in bfloat16 for models of any size: one safetensors file a layer, written piece by piece.

numpy has no bfloat16, so the files are written by their format: the length of a header, the header, the values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

_DRAWN_NUMBERS = 1 << 24
"""Random numbers that are drawn, since drawing takes most of the time. Larger weights repeat them, each from another
place."""

Shape = tuple[int, ...]


def write_bfloat16_weights(
    shapes: Iterable[tuple[str, Shape]], initializer_range: float, seed: int, directory: Path
) -> None:
    """Write weights by name: matrices with normally distributed numbers, vectors (norms) of ones. Deterministic."""
    random = np.random.default_rng(seed)
    drawn = _bfloat16(random.standard_normal(_DRAWN_NUMBERS, np.float32) * np.float32(initializer_range))
    weight_map: dict[str, str] = {}
    for number, (_, weights) in enumerate(groupby(shapes, key=lambda weight: _layer_of(weight[0]))):
        file, of_layer = f"model-{number:05}.safetensors", dict(weights)
        weight_map |= dict.fromkeys(of_layer, file)
        with (directory / file).open("wb") as stream:
            _write_header(stream, of_layer)
            for shape in of_layer.values():
                _write_values(stream, shape, drawn, int(random.integers(_DRAWN_NUMBERS)))
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _layer_of(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` → `model.layers.3`; other names as they are."""
    return ".".join(name.split(".")[:3])


def _write_header(stream: BinaryIO, shapes: Mapping[str, Shape]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, shape in shapes.items():
        end = begin + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    stream.write(len(encoded).to_bytes(8, "little"))
    stream.write(encoded)


def _write_values(stream: BinaryIO, shape: Shape, drawn: npt.NDArray[np.uint16], first: int) -> None:
    if len(shape) == 1:
        stream.write(_bfloat16(np.ones(shape, np.float32)).tobytes())
        return
    left = math.prod(shape)
    while left:
        piece = drawn[first : first + left]
        stream.write(piece.tobytes())
        left, first = left - len(piece), 0


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper halves of the numbers, rounded to nearest."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
