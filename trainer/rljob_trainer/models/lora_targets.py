"""The linear layers of a model that low-rank adapters can be added to. Reads only the headers of the weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rljob_trainer.errors import BadInput
from rljob_trainer.models.checkpoint import policy_weight_shapes

MatrixShapes = Mapping[str, tuple[int, ...]]
"""Rows and columns of a weight, by the name of its layer."""

_WEIGHT_OF_A_LINEAR_LAYER = re.compile(r"(?P<layer>.+\.layers\.\d+\..+)\.weight")


def adapted_layers(model_dir: Path, targets: Sequence[str], rank: int) -> MatrixShapes:
    """The linear layers whose names end with one of `targets`; all of the decoder layers if there are none.

    Raises `BadInput` if a target matches no layer, or if `rank` exceeds a side of a matrix.
    """
    linear = _linear_layers(model_dir)
    wanted = targets or _short_names(linear)
    if missing := [target for target in wanted if not any(_matches(layer, target) for layer in linear)]:
        raise BadInput(
            f"policy.lora.targets: expected names of linear layers of the model, found {', '.join(missing)}; "
            f"write some of {', '.join(_short_names(linear))}, or omit targets for all of them"
        )
    chosen = {layer: shape for layer, shape in linear.items() if any(_matches(layer, target) for target in wanted)}
    layer, shape = min(chosen.items(), key=lambda item: min(item[1]))
    if rank > min(shape):
        raise BadInput(
            f"policy.lora.rank: expected at most {min(shape)}, the smaller side of {layer} ({shape[0]} x {shape[1]}), "
            f"found {rank}; lower the rank, or leave {layer.rpartition('.')[2]} out of policy.lora.targets"
        )
    return chosen


def all_targets(model_dir: Path) -> tuple[str, ...]:
    """The last parts of the names of all linear layers of the decoder layers, in alphabetical order."""
    return tuple(_short_names(_linear_layers(model_dir)))


def adapter_parameters(layers: MatrixShapes, rank: int) -> int:
    """Number of parameters of the adapters: `rank` × (rows + columns) for each layer."""
    return sum(rank * sum(shape) for shape in layers.values())


def _linear_layers(model_dir: Path) -> dict[str, tuple[int, ...]]:
    shapes = policy_weight_shapes(model_dir)
    found = ((_WEIGHT_OF_A_LINEAR_LAYER.fullmatch(name), shape) for name, shape in shapes.items())
    return {match["layer"]: shape for match, shape in found if match and len(shape) == 2}


def _short_names(layers: MatrixShapes) -> list[str]:
    return sorted({layer.rpartition(".")[2] for layer in layers})


def _matches(layer: str, target: str) -> bool:
    """As in peft."""
    return layer == target or layer.endswith(f".{target}")
