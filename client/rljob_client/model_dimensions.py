"""The dimensions of a model in Hugging Face format, from its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rljob_client.errors import BadInput
from rljob_client.model_files import read_config
from rljob_memory.model_shape import ModelShape, dense_parameters

ADVICE = "use a dense model of the Qwen, Llama or Mistral kind"

_TIED_BY_DEFAULT = frozenset({"gemma", "gemma2", "gemma3_text", "smollm3"})
"""Kinds (`model_type`) whose class in transformers ties the output layer if `tie_word_embeddings` is absent."""
_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma": {"num_key_value_heads": 16, "head_dim": 256},
    "gemma3_text": {"num_key_value_heads": 4, "head_dim": 256},
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "smollm3": {"num_key_value_heads": 4},
}
"""Settings that the classes of transformers 5.19 have if a model leaves them out. Otherwise they follow from others."""


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

    def shape(self, bytes_per_parameter: int, adapter_parameters: int = 0) -> ModelShape:
        """The shape for a memory budget. `adapter_parameters`: number in low-rank adapters; 0 without."""
        return ModelShape(
            parameters=self.parameters,
            layers=self.layers,
            hidden=self.hidden,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocabulary=self.vocabulary,
            bytes_per_parameter=bytes_per_parameter,
            heads=self.heads,
            intermediate=self.intermediate,
            adapter_parameters=adapter_parameters,
        )


def described_dimensions(directory: Path) -> ModelDimensions:
    """The dimensions from `config.json` alone; the number of parameters is that of a Llama of the same sizes."""
    found = read_dimensions(directory, 0)
    return replace(found, parameters=dense_parameters(found.shape(bytes_per_parameter=2), tied=found.tied))


def read_dimensions(directory: Path, parameters: int) -> ModelDimensions:
    """The dimensions in `config.json`. `parameters`: number of weights, which it does not contain.

    Raises `BadInput` if a setting is missing or is not a positive integer.
    """
    config = read_config(directory)
    defaults = _DEFAULTS.get(str(config.get("model_type")), {})
    try:
        hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
        return ModelDimensions(
            parameters=parameters,
            layers=_count(config, "num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=config.get("num_key_value_heads", defaults.get("num_key_value_heads")) or heads,
            head_dim=config.get("head_dim", defaults.get("head_dim")) or hidden // heads,
            intermediate=_count(config, "intermediate_size"),
            vocabulary=_count(config, "vocab_size"),
            max_positions=_count(config, "max_position_embeddings"),
            tied=is_tied(config),
        )
    except KeyError as error:
        raise BadInput(
            f"expected the settings of a decoder-only language model in {directory / 'config.json'}, found no {error}; "
            f"{ADVICE}"
        ) from error
    except TypeError as error:
        raise BadInput(f"{error} in {directory / 'config.json'}; copy the file again from its source") from error


def _count(config: dict[str, Any], name: str) -> int:
    """A setting that is a positive integer. Raises `KeyError` without it, `TypeError` if it is anything else."""
    value = config[name]
    if not isinstance(value, int) or value < 1:
        raise TypeError(f"expected a positive integer as {name}, found {value!r:.100}")
    return value


def is_tied(config: Mapping[str, Any]) -> bool:
    """True if the output layer shares its weight with the embedding, by the settings of a model."""
    given = config.get("tie_word_embeddings")
    return config.get("model_type") in _TIED_BY_DEFAULT if given is None else bool(given)
