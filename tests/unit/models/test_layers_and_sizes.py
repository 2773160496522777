"""Parts of models: layers with adapters, sizes that an engine can divide, and blocks that it can quantize."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rljob_client.errors import BadInput
from rljob_trainer.models.lora_targets import adapted_layers, adapter_parameters, all_targets, require_adaptable
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.runtime.requirements import require_shardable, require_whole_blocks


def configuration(directory: Path, **sizes: object) -> Path:
    (directory / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], **sizes}))
    return directory


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "possible"),
    [
        (32, 8, 12_288, [1, 2, 4, 8, 16, 32]),  # Qwen3-8B; beyond 8, key-value heads are repeated
        (14, 2, 4864, [1, 2]),  # Qwen2.5-0.5B: its MLP has no multiple of 7 columns
        (12, 3, 384, [1, 3, 6, 12]),
        (4, None, 64, [1, 2, 4]),
    ],
)
def test_heads_and_columns_are_divided_equally(
    heads: int, kv_heads: int | None, width: int, possible: list[int], tmp_path: Path
) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": width}
    directory = configuration(tmp_path, **sizes)
    named = f"to suit the model's {heads} attention heads, {kv_heads or heads} key-value heads and MLP of {width}"
    for size in range(1, 65):
        if size in possible:
            require_shardable(directory, size)
        else:
            with pytest.raises(BadInput, match=rf"{named}, found {size}; write 1 or "):
                require_shardable(directory, size)


@pytest.mark.parametrize(
    ("sizes", "tensor_parallel_size", "found"),
    [
        ((1024, 16, 3072, 128), 1, None),  # Qwen3-0.6B
        ((896, 14, 4864, None), 1, None),  # Qwen2.5-0.5B
        ((896, 14, 4864, None), 2, "num_attention_heads x head_dim: 448 in each of 2 processes"),
        ((576, 9, 1536, None), 1, "hidden_size: 576, num_attention_heads x head_dim: 576; write Fp8PerChannel"),
        ((4096, 32, 11_008, None), 4, "intermediate_size: 2752 in each of 4 processes; write"),  # Llama 2
    ],
)
def test_the_inputs_of_every_process_are_whole_blocks(
    sizes: tuple[int | None, ...], tensor_parallel_size: int, found: str | None, tmp_path: Path
) -> None:
    names = ("hidden_size", "num_attention_heads", "intermediate_size", "head_dim")
    directory = configuration(tmp_path, **dict(zip(names, sizes, strict=True)))
    if found is None:
        require_whole_blocks(directory, tensor_parallel_size)
        return
    with pytest.raises(BadInput, match=f"multiples of 128 inputs for Fp8PerBlock, found {found}"):
        require_whole_blocks(directory, tensor_parallel_size)


def test_a_configuration_without_the_sizes_is_left_to_vllm(tmp_path: Path) -> None:
    require_whole_blocks(configuration(tmp_path), 1)
    require_shardable(tmp_path, 3)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model("random://qwen3?hidden=64&layers=2", tmp_path_factory.mktemp("models"))


def test_all_linear_layers_of_the_decoder_get_an_adapter(model_dir: Path) -> None:
    names = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    assert all_targets(model_dir) == names
    layers = adapted_layers(model_dir, (), 4)
    assert {layer.rpartition(".")[2] for layer in layers} == set(names)
    assert len(layers) == 2 * len(names)
    assert not any("embed" in layer or "lm_head" in layer for layer in layers)


def test_targets_match_the_ends_of_names(model_dir: Path) -> None:
    layers = adapted_layers(model_dir, ["q_proj", "mlp.up_proj", "model.layers.1.self_attn.v_proj"], 4)
    assert sorted(layers) == [
        "model.layers.0.mlp.up_proj",
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.v_proj",
    ]
    assert adapter_parameters({"a": (8, 4), "b": (2, 2)}, 3) == 3 * 12 + 3 * 4


REFUSED: list[tuple[list[str], int, str]] = [
    (
        ["q_proj", "query", "lm_head"],
        4,
        "policy.lora.targets: expected names of linear layers of the model, found query, lm_head; "
        "write some of down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj, or omit targets for all of them",
    ),
    ([], 1024, "policy.lora.rank: expected at most 64, the smaller side of model.layers.0"),
]


@pytest.mark.parametrize(("targets", "rank", "message"), REFUSED, ids=["target", "rank"])
def test_weights_and_configuration_refuse_the_same_with_what_to_write(
    model_dir: Path, tmp_path: Path, targets: list[str], rank: int, message: str
) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    configuration(tmp_path, **config)
    require_adaptable(tmp_path, ["q_proj", "mlp.up_proj"], 4)
    require_adaptable(tmp_path, [], 4)
    with pytest.raises(BadInput) as by_weights:
        adapted_layers(model_dir, targets, rank)
    with pytest.raises(BadInput) as by_configuration:
        require_adaptable(tmp_path, targets, rank)
    assert str(by_weights.value).startswith(message)
    assert str(by_configuration.value) == str(by_weights.value)
    configuration(tmp_path, **config | {"model_type": "unknown"})
    require_adaptable(tmp_path, targets, rank)
