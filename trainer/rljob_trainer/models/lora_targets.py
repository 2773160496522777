"""The linear layers of a model that low-rank adapters can be added to.

Read from the headers of the weights, or, for the kinds of models that are known, from `config.json` alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rljob_client.errors import BadInput
from rljob_client.model_dimensions import described_dimensions
from rljob_client.model_files import read_config
from rljob_trainer.models.checkpoint import policy_weight_shapes

MatrixShapes = Mapping[str, tuple[int, ...]]
"""Rows and columns of a weight, by the name of its layer."""

_SEPARATE_KINDS = frozenset({"gemma", "gemma3_text", "llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3"})
"""Kinds (`model_type`) with separate layers for queries, keys, values, gate and up."""

_FUSED_KINDS = frozenset({"phi3"})
"""Kinds with one layer for queries, keys and values, and one for gate and up."""

_WEIGHT_OF_A_LINEAR_LAYER = re.compile(r"(?P<layer>.+\.layers\.\d+\..+)\.weight")


def adapted_layers(model_dir: Path, targets: Sequence[str], rank: int) -> MatrixShapes:
    """The linear layers whose names end with one of `targets`; all of the decoder layers if there are none.

    Raises `BadInput` if a target matches no layer, or if `rank` exceeds a side of a matrix.
    """
    return _chosen(_linear_layers(model_dir), targets, rank)


def require_adaptable(model_dir: Path, targets: Sequence[str], rank: int) -> None:
    """Raise `BadInput` as `adapted_layers` does. The weights may be missing.

    A kind of model that is not known is not checked.
    """
    if (linear := described_layers(model_dir)) is not None:
        _chosen(linear, targets, rank)


def described_layers(model_dir: Path) -> MatrixShapes | None:
    """The linear layers of the decoder layers by `config.json`; None if the kind of the model is not known."""
    kind = read_config(model_dir).get("model_type")
    if kind not in _SEPARATE_KINDS | _FUSED_KINDS:
        return None
    model = described_dimensions(model_dir)
    hidden, width = model.hidden, model.intermediate
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes = {"self_attn.o_proj": (hidden, queries), "mlp.down_proj": (hidden, width)}
    if kind in _FUSED_KINDS:
        shapes |= {"self_attn.qkv_proj": (queries + 2 * keys, hidden), "mlp.gate_up_proj": (2 * width, hidden)}
    else:
        shapes |= {"self_attn.q_proj": (queries, hidden), "mlp.gate_proj": (width, hidden)}
        shapes |= {"self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden)}
        shapes |= {"mlp.up_proj": (width, hidden)}
    return {f"model.layers.{layer}.{name}": shape for layer in range(model.layers) for name, shape in shapes.items()}


def _chosen(linear: MatrixShapes, targets: Sequence[str], rank: int) -> MatrixShapes:
    wanted = targets or _short_names(linear)
    if missing := [target for target in wanted if not any(_matches(layer, target) for layer in linear)]:
        raise BadInput(
            f"policy.lora.targets: expected names of linear layers of the model, found {', '.join(missing)}; "
            f"write some of {', '.join(_short_names(linear))}, or omit targets for all of them"
        )
    chosen = {layer: shape for layer, shape in linear.items() if any(_matches(layer, target) for target in wanted)}
    layer, shape = min(chosen.items(), key=lambda item: (min(item[1]), item[0]))
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
    """True if `target` selects `layer` according to peft's rules."""
    return layer == target or layer.endswith(f".{target}")
