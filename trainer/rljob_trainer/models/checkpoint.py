"""Local models in Hugging Face format: dimensions, rotary embeddings and tokenizer. Free of torch."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rljob_client.errors import BadInput
from rljob_client.model_files import absent, advice, read_config, read_json, weight_shapes

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


def validate_checkpoint(directory: Path) -> None:
    """Raise `BadInput`, with the name of the file, if configuration, weights or tokenizer are missing or unreadable."""
    read_config(directory)
    weight_shapes(directory)
    _validate_tokenizer(directory)


def validate_description(directory: Path) -> None:
    """As `validate_checkpoint`, without the weights, which may be missing."""
    read_config(directory)
    _validate_tokenizer(directory)


def model_dimensions(directory: Path) -> ModelDimensions:
    """The dimensions of the model, from `config.json` and the headers of its weights."""
    return _dimensions(directory, sum(map(math.prod, policy_weight_shapes(directory).values())))


def described_dimensions(directory: Path) -> ModelDimensions:
    """The dimensions from `config.json` alone; the number of parameters is that of a Llama of the same sizes."""
    found = _dimensions(directory, 0)
    attention = 2 * found.hidden * found.head_dim * (found.heads + found.kv_heads)
    layer = attention + 3 * found.hidden * found.intermediate + 2 * found.hidden
    embeddings = (1 if found.tied else 2) * found.vocabulary * found.hidden
    return replace(found, parameters=found.layers * layer + embeddings + found.hidden)


def _dimensions(directory: Path, parameters: int) -> ModelDimensions:
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


def described_positions(directory: Path) -> int:
    """Maximum tokens of a sequence of the model, from `config.json`. Raises `BadInput` if it is missing."""
    positions = read_config(directory).get("max_position_embeddings")
    if not isinstance(positions, int):
        raise BadInput(
            f"expected max_position_embeddings of a decoder-only language model in {directory / 'config.json'}, "
            f"found {positions!r}"
        )
    return positions


def require_same_rope(directory: Path, longest: int) -> None:
    """Raise `BadInput` if policy and engine would use other rotary embeddings for sequences of up to `longest` tokens.

    Dynamic scaling depends on the length of the batch in transformers, and on the length of the model in vLLM. Long
    RoPE has two sets of factors: transformers selects by the batch, vLLM by its maximum length; both use the short ones
    if no sequence exceeds the original length.
    """
    config, file = read_config(directory), directory / "config.json"
    for rope in ropes_of(config):
        kind = rope.get("rope_type") or rope.get("type")
        if kind == "dynamic":
            raise BadInput(
                f"expected a rotary embedding that does not depend on the length in {file}, found rope_scaling of the "
                "type dynamic; use a model without it"
            )
        original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
        if kind in ("longrope", "su") and (not isinstance(original, int) or longest > original):
            raise BadInput(
                "expected algorithm.maxPromptTokens + algorithm.maxResponseTokens to be at most "
                f"original_max_position_embeddings ({original or 'not set'}) for a model with rope_scaling of the type "
                f"{kind}, found {longest}: policy and engine would compute different embeddings of longer sequences. "
                "Lower them"
            )


def ropes_of(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The settings of the rotary embeddings: one, or one for each kind of layer. Raises `BadInput` if they are no
    object."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise BadInput(f"expected an object as rope_parameters or rope_scaling in config.json, found {given!r:.100}")
    return [each for each in given.values() if isinstance(each, dict)] or [given]


def policy_weight_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the trained weights by checkpoint name, without buffers and without a tied output layer."""
    tied = is_tied(read_config(directory))
    return {
        name: shape
        for name, shape in weight_shapes(directory).items()
        if not (tied and name == "lm_head.weight") and not name.endswith("rotary_emb.inv_freq")
    }


def read_generation_config(directory: Path) -> dict[str, Any]:
    """The settings in `generation_config.json`; empty without that file. Raises `BadInput` if it is unreadable."""
    file = directory / "generation_config.json"
    return read_json(file) if file.exists() else {}


def _validate_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer

    read_json(directory / "tokenizer_config.json")
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise BadInput(
            f"expected a tokenizer in {file}, found {absent(file)}; write older formats with save_pretrained of "
            "transformers.AutoTokenizer"
        )
    try:
        Tokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise BadInput(f"cannot read the tokenizer in {file}: {error}; {advice(file)}") from error


def load_tokenizer(model_directory: Path) -> Any:
    """The model's fast tokenizer (`transformers.PreTrainedTokenizerFast`), with its chat template, if any.

    Raises `BadInput` if it cannot be read.

    `AutoTokenizer` would import torch and the registry of all models, which takes 8 seconds.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(model_directory, local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise BadInput(f"cannot read the tokenizer in {model_directory}: {error}") from error


_IN_MEMORY = {"tmpfs", "ramfs"}


def is_in_memory(directory: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """True if the file system of `directory` is in memory. False if that is not known.

    `mounts`: the table of file systems, in the format of fstab(5); the last entry of a directory covers the others.
    """
    kinds: dict[str, str] = {}
    with suppress(OSError):
        for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
            _, place, kind, *_ = [*line.split(), "", "", ""]
            kinds[place.replace("\\040", " ")] = kind
    path = Path(os.path.realpath(directory))
    return next((kinds[str(place)] in _IN_MEMORY for place in (path, *path.parents) if str(place) in kinds), False)
