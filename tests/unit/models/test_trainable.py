"""Models that cannot be trained, or whose files contradict each other, are refused before anything starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig

from rljob_client.errors import BadInput
from rljob_client.model_dimensions import described_dimensions
from rljob_testing.supported_models import KINDS, TRAINED, Kind
from rljob_trainer.models.checkpoint import require_same_rope, validate_checkpoint
from rljob_trainer.models.consistency import require_same_window, require_trainable, require_trainable_settings
from rljob_trainer.models.lora_targets import adapted_layers, described_layers
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.policy.packed_attention import PACKED_KINDS

Weights = dict[str, np.ndarray[Any, Any]]

_SOURCE = "random://qwen3?hidden=32&layers=2&heads=2&kvHeads=1&headDim=16&vocabulary=64"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model(_SOURCE, tmp_path_factory.mktemp("cache"))


@pytest.fixture
def model(source: Path, tmp_path: Path) -> Path:
    return shutil.copytree(source, tmp_path / "model")


def change(model: Path, file: str, **settings: Any) -> None:
    """Set fields of a JSON file, which need not exist."""
    path = model / file
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(content | settings), encoding="utf-8")


def remove(model: Path, name: str) -> None:
    content = json.loads((model / "config.json").read_text(encoding="utf-8"))
    del content[name]
    (model / "config.json").write_text(json.dumps(content), encoding="utf-8")


def rewrite(model: Path, edit: Callable[[Weights], object]) -> None:
    tensors = load_file(model / "model.safetensors")
    edit(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mymodel"}, "expected a model_type of transformers .*found 'mymodel'; use"),
    ({"model_type": ["qwen3"]}, r"expected a model_type of transformers .*found \['qwen3'\]"),
    (
        {"model_type": "mymodel", "auto_map": {"AutoConfig": "my.Config"}},
        r"found 'mymodel' and its own code \(auto_map\)",
    ),
    ({"architectures": ["Qwen3ForSequenceClassification"]}, "expected a causal language model"),
    ({"architectures": "Qwen3ForCausalLM"}, r"expected architectures .*\[\"Qwen3ForCausalLM\"\]"),
    ({"quantization_config": {"quant_method": "awq"}}, "not quantized, found quantization_config"),
    ({"attn_logit_softcapping": 50.0}, "found attn_logit_softcapping: 50.0"),
    ({"is_causal": False}, "expected causal attention, found is_causal: false"),
    ({"use_bidirectional_attention": True}, "expected causal attention"),
    ({"hidden_act": "gelu"}, "expected hidden_act: silu for a model of type qwen3, found .*gelu"),
    ({"attention_bias": True}, "expected attention_bias: False .* found attention_bias: True"),
    ({"partial_rotary_factor": 0.5}, "found partial_rotary_factor: 0.5"),
    ({"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}}, "found partial_rotary_factor: 0.5"),
    ({"rope_scaling": {"type": "proportional"}}, "found rope_type: 'proportional'"),
    ({"rope_scaling": [4.0]}, "expected an object as rope_parameters or rope_scaling"),
    ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, r"the same layer_types \(use_sliding_"),
    ({"layer_types": ["sliding_attention", "full_attention"]}, "expected the same layer_types"),
    ({"model_type": "qwen2", "head_dim": 32}, "expected head_dim: hidden_size / num_attention_heads"),
    ({"model_type": "gemma", "hidden_activation": "gelu"}, "expected hidden_activation: gelu_pytorch_tanh"),
    ({"model_type": "llama", "qkv_bias": True}, "expected qkv_bias: False"),
    ({"model_type": "mistral", "llama_4_scaling": {"beta": 0.1}}, "expected llama_4_scaling: None"),
    ({"layer_types": [["sliding_attention"]]}, "found unhashable type"),
    ({"rope_parameters": {"rope_type": ["yarn"]}}, "found unhashable type"),
    ({"model_type": "qwen2", "hidden_size": "32"}, "expected the settings of a language model"),
    ({"dual_chunk_attention_config": {"chunk_size": 8}}, "attention over the whole sequence"),
    ({"vocab_size": "64"}, "expected vocab_size .*found '64'"),
    ({"pad_token_id": 64}, "expected pad_token_id to be below 64.*config.json, found 64"),
    ({"eos_token_id": [2, 99]}, "expected eos_token_id to be below 64.*config.json, found 99"),
    ({"bos_token_id": "<bos>"}, "expected a token id as bos_token_id.*found '<bos>'"),
]
"""Settings in config.json, and messages."""


@pytest.mark.parametrize(
    ("file", "settings", "message"),
    [
        *(("config.json", *row) for row in CONTRADICTIONS),
        ("generation_config.json", {"eos_token_id": 70}, "below 64.*generation_config.json, found 70"),
        ("generation_config.json", {"eos_token_id": [2, -1]}, "not negative in .*generation_config.json, found -1"),
        ("generation_config.json", {"pad_token_id": 70}, "below 64.*generation_config.json, found 70"),
        ("adapter_config.json", {"peft_type": "LORA"}, "found adapter_config.json next to config.json"),
    ],
)
def test_settings_that_contradict_the_model_are_refused(
    model: Path, file: str, settings: dict[str, Any], message: str
) -> None:
    change(model, file, **settings)
    (model / "model.safetensors").unlink()
    with pytest.raises(BadInput, match=message):
        require_trainable_settings(model)


@pytest.mark.parametrize(
    ("settings", "edit", "message"),
    [
        ({"vocab_size": 60}, None, "expected vocab_size in .* the rows of model.embed_tokens.weight, 64, found 60"),
        ({}, lambda weights: weights.pop(_HEAD), "expected lm_head.weight .* found none; write tie_word_embeddings"),
        ({}, lambda weights: weights.pop(_DOWN), f"expected {_DOWN} to have the shape .* found none"),
        ({"intermediate_size": 48}, None, r"to have the shape \[32, 48\]"),
        ({"num_hidden_layers": 1}, None, r"expected 1 layers .*found model\.layers\.1\."),
        ({"num_hidden_layers": 3}, None, r"expected model\.layers\.2\..*found none"),
        ({}, lambda weights: weights.update({_DOWN: weights[_DOWN].astype(np.int8)}), f"found I8 in {_DOWN}: .*quant"),
    ],
)
def test_weights_that_contradict_the_settings_are_refused(
    model: Path, settings: dict[str, Any], edit: Callable[[Weights], object] | None, message: str
) -> None:
    change(model, "config.json", **settings)
    if edit is not None:
        rewrite(model, edit)
    with pytest.raises(BadInput, match=message):
        require_trainable(model)


@pytest.mark.parametrize(
    "settings",
    [
        {"auto_map": {"AutoConfig": "configuration_qwen.Config"}},
        {"pad_token_id": -1},
        {"layer_types": ["full_attention", "full_attention"], "head_dim": 16},
        {"partial_rotary_factor": 1.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
        {"temperature": 0.6, "eos_token_id": [2, 3]},
    ],
)
def test_settings_that_all_readers_understand_are_accepted(model: Path, settings: dict[str, Any]) -> None:
    change(model, "config.json", **settings)
    generation = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 20], "max_new_tokens": 3}
    change(model, "generation_config.json", **generation)
    require_trainable(model)
    rewrite(model, lambda weights: weights.update({name: each.astype(np.float16) for name, each in weights.items()}))
    require_trainable(model)


def test_a_directory_of_adapters_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(BadInput, match=r"found adapter_config\.json: .*merge_and_unload.*policy\.lora\.export: Merged"):
        validate_checkpoint(tmp_path)


@pytest.mark.parametrize("setting", ["hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size"])
@pytest.mark.parametrize("value", ["many", 0, None])
def test_a_dimension_that_is_no_number_is_named(model: Path, setting: str, value: object) -> None:
    change(model, "config.json", **{setting: value})
    with pytest.raises(BadInput, match=f"expected a positive integer as {setting}"):
        described_dimensions(model)
    remove(model, setting)
    with pytest.raises(BadInput, match=f"found no '{setting}'"):
        described_dimensions(model)


def test_a_window_that_only_the_engine_has_limits_the_lengths(model: Path) -> None:
    for kind, window in (("llama", 16), ("llama", None), ("qwen3", 15)):
        change(model, "config.json", model_type=kind, sliding_window=window)
        require_same_window(model, 16)
    change(model, "config.json", model_type="llama", sliding_window=15)
    with pytest.raises(BadInput, match=r"at most sliding_window \(15\) .* found 16: only the engine has a window"):
        require_same_window(model, 16)


@pytest.mark.parametrize("model_type", sorted(kind.model_type for kind in TRAINED))
def test_absent_settings_have_the_defaults_of_transformers(model: Path, model_type: str) -> None:
    change(model, "config.json", model_type=model_type, hidden_size=64, num_attention_heads=32)
    for name in ("num_key_value_heads", "head_dim", "tie_word_embeddings"):
        remove(model, name)
    expected, found = AutoConfig.from_pretrained(model), described_dimensions(model)
    assert found.kv_heads == expected.num_key_value_heads
    assert found.head_dim == (getattr(expected, "head_dim", None) or 2)
    assert found.tied == expected.tie_word_embeddings
    change(model, "config.json", tie_word_embeddings=not found.tied)
    assert described_dimensions(model).tied is not found.tied


# --- kinds ---


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.model_type)
def test_a_kind_is_refused_by_name_or_trains(kind: Kind, tmp_path: Path) -> None:
    kind.write(tmp_path)
    if kind.refused is None:
        require_trainable(tmp_path)
        assert described_layers(tmp_path) == adapted_layers(tmp_path, (), 1)
        return
    with pytest.raises(BadInput, match=kind.refused):
        require_trainable(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(BadInput, match=kind.refused):
        require_trainable_settings(tmp_path)


def test_every_packed_kind_is_compared() -> None:
    assert {kind.model_type for kind in KINDS} >= PACKED_KINDS


@pytest.mark.parametrize("setting", ["lm_head_multiplier", "final_logit_softcapping", "logits_scaling"])
def test_a_scaled_or_capped_head_is_refused(model: Path, setting: str) -> None:
    for value in (1.0, None):
        change(model, "config.json", **{setting: value})
        require_trainable(model)
    change(model, "config.json", **{setting: 0.25})
    with pytest.raises(BadInput, match=rf"neither scaled nor capped, found {setting}: 0\.25"):
        require_trainable(model)


def test_a_mixture_of_experts_is_refused(model: Path) -> None:
    expert = "model.layers.1.mlp.experts.0.down_proj.weight"
    rewrite(model, lambda weights: weights.update({expert: weights.pop(_DOWN)}))
    with pytest.raises(BadInput, match=r"expected a dense model, .*mlp\.experts\.0"):
        require_trainable(model)


LONG_ROPE = {"rope_parameters": {"rope_type": "longrope"}, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("settings", "longest", "message"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 8, "of the type dynamic"),
        (LONG_ROPE, 65, r"\(64\).*found 65"),
        (LONG_ROPE, 64, None),
        ({"rope_scaling": {"type": "su"}}, 8, "not set"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 1000, None),
        ({}, 1000, None),
    ],
)
def test_rope_that_policy_and_engine_compute_differently_is_refused(
    model: Path, settings: dict[str, object], longest: int, message: str | None
) -> None:
    change(model, "config.json", **settings)
    if message is None:
        require_same_rope(model, longest)
    else:
        with pytest.raises(BadInput, match=message):
            require_same_rope(model, longest)
