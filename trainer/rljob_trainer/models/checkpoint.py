"""Local models in Hugging Face format: validation, dimensions and tokenizer.

Reads only the headers of the weights. Free of torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_trainer.errors import BadInput

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


_SCALED_HEAD_SETTINGS = (
    "final_logit_softcapping",
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
    "logits_soft_cap",
    "output_logit_soft_cap",
)
"""Settings of `config.json` that cap or scale the logits, unless they are 1 or null."""


@dataclass(frozen=True, slots=True)
class ModelDimensions:
    """Dimensions of a decoder-only model."""

    parameters: int
    """Number of weights; a tied output layer counts once."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    max_positions: int
    """Maximum tokens of a sequence."""

    tied: bool
    """The output layer shares its weight with the embedding."""


def validate_checkpoint(directory: Path) -> None:
    """Raise `BadInput`, with the name of the file, if configuration, weights or tokenizer are missing or unreadable."""
    _read_config(directory)
    weight_shapes(directory)
    _validate_tokenizer(directory)


def model_dimensions(directory: Path) -> ModelDimensions:
    """The dimensions of the model, from `config.json` and the headers of its weights."""
    config = _read_config(directory)
    try:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        return ModelDimensions(
            parameters=sum(map(math.prod, policy_weight_shapes(directory).values())),
            layers=config["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            intermediate=config["intermediate_size"],
            vocabulary=config["vocab_size"],
            max_positions=config["max_position_embeddings"],
            tied=bool(config.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise BadInput(
            f"expected the settings of a decoder-only language model in {directory / 'config.json'}, found no {error}"
        ) from error


def require_trainable(directory: Path) -> None:
    """Raise `BadInput` for a model whose kind cannot be trained, from its settings and the names of its weights."""
    config = _read_config(directory)
    if scaled := scaled_head_settings(config):
        raise BadInput(
            f"expected a model whose logits are neither scaled nor capped in {directory}, found {', '.join(scaled)} in "
            "config.json; use a model of the Qwen, Llama or Mistral kind"
        )
    if experts := next((name for name in weight_shapes(directory) if ".experts." in name), None):
        raise BadInput(
            f"expected a dense model in {directory}, found a mixture of experts ({experts}); "
            "use a dense model of the Qwen, Llama or Mistral kind"
        )


def scaled_head_settings(config: Mapping[str, Any]) -> list[str]:
    """The settings of `config` that cap or scale the logits, as `name: value`."""
    given = ((name, config.get(name)) for name in _SCALED_HEAD_SETTINGS)
    return [f"{name}: {value}" for name, value in given if value not in (None, 1.0)]


def policy_weight_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the trained weights by checkpoint name, without buffers and without a tied output layer."""
    tied = bool(_read_config(directory).get("tie_word_embeddings", False))
    return {
        name: shape
        for name, shape in weight_shapes(directory).items()
        if not (tied and name == "lm_head.weight") and not name.endswith("rotary_emb.inv_freq")
    }


def weight_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors by name. Raises `BadInput` if a file is missing or truncated."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _weight_files(directory):
        shapes |= _shapes_in(file)
    if missing := sorted(_indexed_names(directory) - shapes.keys()):
        raise BadInput(f"{directory / _INDEX} lists weights that its files lack: {', '.join(missing[:5])}")
    return shapes


def _weight_files(directory: Path) -> list[Path]:
    if (directory / _INDEX).is_file():
        names = sorted(set(_weight_map(directory).values()))
    elif (directory / _SINGLE).is_file():
        names = [_SINGLE]
    else:
        raise BadInput(
            f"expected weights in {directory} as {_SINGLE} or {_INDEX}, found neither; "
            "convert older formats with save_pretrained of transformers"
        )
    for name in names:
        if not (directory / name).is_file():
            raise BadInput(f"{directory / _INDEX} names the weights file {name}, which is missing")
    return [directory / name for name in names]


def _indexed_names(directory: Path) -> set[str]:
    return set(_weight_map(directory)) if (directory / _INDEX).is_file() else set()


def _weight_map(directory: Path) -> dict[str, str]:
    weight_map = _read_json(directory / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInput(f"expected weight_map in {directory / _INDEX}, found none")
    return weight_map


def _shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise BadInput(f"cannot read the weights in {file}, it is truncated or no safetensors file: {error}") from error


def _read_config(directory: Path) -> dict[str, Any]:
    config = _read_json(directory / "config.json")
    if not config.get("architectures"):
        raise BadInput(f"expected architectures in {directory / 'config.json'}, found none")
    return config


def _validate_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer

    _read_json(directory / "tokenizer_config.json")
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise BadInput(f"expected a tokenizer in {file}, found none")
    try:
        Tokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise BadInput(f"cannot read the tokenizer in {file}: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise BadInput(f"expected {file.name} in the model directory {file.parent}, found none") from error
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot read {file}: {error}") from error
    if not isinstance(content, dict):
        raise BadInput(f"expected a JSON object in {file}, found {type(content).__name__}")
    return content


def load_tokenizer(model_directory: Path) -> Any:
    """The model's fast tokenizer (`transformers.PreTrainedTokenizerFast`), with its chat template, if any.

    `AutoTokenizer` would import torch and the registry of all models, which takes 8 seconds.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(model_directory, local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise BadInput(f"cannot read the tokenizer in {model_directory}: {error}") from error
