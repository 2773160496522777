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

_LARGEST = 1 << 24
"""Largest value of a dimension."""

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
        kv_heads = _count({"num_key_value_heads": heads, **defaults, **_set(config)}, "num_key_value_heads")
        if heads % kv_heads:
            raise TypeError(f"expected num_key_value_heads to divide num_attention_heads, found {kv_heads} and {heads}")
        return ModelDimensions(
            parameters=parameters,
            layers=_count(config, "num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=_count({"head_dim": hidden // heads, **defaults, **_set(config)}, "head_dim"),
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
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
        raise TypeError(f"expected a positive integer as {name}, at most {_LARGEST:,}, found {value!r:.100}")
    return value


def _set(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if value is not None}


def is_tied(config: Mapping[str, Any]) -> bool:
    """True if the output layer shares its weight with the embedding, by the settings of a model."""
    given = config.get("tie_word_embeddings")
    return config.get("model_type") in _TIED_BY_DEFAULT if given is None else bool(given)


# Models whose memory the budget does not know.

_DENSE_KINDS = frozenset(
    {
        *("cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "granite"),
        *("helium", "hunyuan_v1_dense", "llama", "ministral", "mistral", "olmo", "olmo2", "olmo3", "phi3", "qwen2"),
        *("qwen3", "seed_oss", "smollm3", "stablelm"),
    }
)
"""Kinds (`model_type`) with attention and a gated layer in each block, whose size follows from `config.json`."""
_NOT_KNOWN = {
    "the activations of experts, and the time that they take": (
        *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    ),
    "a compressed KV cache": ("kv_lora_rank",),
    "the state of recurrent layers": (
        *("state_size", "ssm_cfg", "mamba_d_ssm", "mamba_n_heads", "attn_layer_period", "linear_num_key_heads"),
        *("hybrid_override_pattern", "conv_L_cache", "layers_block_type", "lru_width"),
    ),
    "an encoder": ("is_encoder_decoder",),
    "an encoder of images or sound": ("vision_config", "audio_config"),
    "the training of quantized weights": ("quantization_config",),
}
"""Settings of a `config.json` that show a part which the budget lacks."""
_DIMENSIONS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")


def require_dense(directory: Path) -> None:
    """Raise `BadInput`, with the known and the unknown parts, for a model whose size its settings do not show."""
    config, file = read_config(directory), directory / "config.json"
    kind = str(config.get("model_type"))
    shown = next(
        ((part, name) for part, names in _NOT_KNOWN.items() for name in names if config.get(name) not in (None, 0)),
        None,
    )
    if shown is not None:
        found, part = f"{shown[1]}: {config[shown[1]]!s:.40}", shown[0]
    elif not config["architectures"][0].endswith(("ForCausalLM", "LMHeadModel")):
        found, part = "another kind of output than the next token", "its output layer"
    elif kind not in _DENSE_KINDS:
        found, part = f"model_type: {kind:.40}", "the layers of its blocks"
    else:
        return
    known = ", ".join(f"{name} {config[name]}" for name in _DIMENSIONS if isinstance(config.get(name), int))
    raise BadInput(
        f"expected a dense language model of a known kind, found {config['architectures'][0]:.80} with {found} in "
        f"{file}; known: {known or 'nothing'}; not known: {part}"
    )
