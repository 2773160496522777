"""Local models in Hugging Face format: dimensions, rotary embeddings and tokenizer. Free of torch."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rljob_client.errors import BadInput
from rljob_client.model_dimensions import ModelDimensions, is_tied, read_dimensions
from rljob_client.model_files import absent, advice, read_config, read_json, weight_shapes


def validate_checkpoint(directory: Path) -> None:
    """Raise `BadInput`, with the name of the file, if configuration, weights or tokenizer are missing or unreadable."""
    read_config(directory)
    weight_shapes(directory)
    _validate_tokenizer(directory)


def validate_description(directory: Path) -> None:
    """Check a checkpoint like `validate_checkpoint`, except for the weights, which may be missing."""
    read_config(directory)
    _validate_tokenizer(directory)


def model_dimensions(directory: Path) -> ModelDimensions:
    """The dimensions of the model, from `config.json` and the headers of its weights."""
    return read_dimensions(directory, sum(map(math.prod, policy_weight_shapes(directory).values())))


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


_MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs"}


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
    return next(
        (kinds[str(place)] in _MEMORY_FILE_SYSTEMS for place in (path, *path.parents) if str(place) in kinds), False
    )
