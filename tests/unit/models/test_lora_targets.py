from __future__ import annotations

import json
from pathlib import Path

import pytest

from rljob_client.errors import BadInput
from rljob_trainer.models.lora_targets import adapted_layers, adapter_parameters, all_targets, require_adaptable
from rljob_trainer.models.resolve import resolve_model


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


def test_a_target_without_a_layer_is_refused_with_the_names_there_are(model_dir: Path) -> None:
    with pytest.raises(BadInput) as refused:
        adapted_layers(model_dir, ["q_proj", "query", "lm_head"], 4)
    assert str(refused.value) == (
        "policy.lora.targets: expected names of linear layers of the model, found query, lm_head; "
        "write some of down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj, or omit targets for all of them"
    )


def test_a_rank_larger_than_a_matrix_is_refused_with_the_largest(model_dir: Path) -> None:
    with pytest.raises(
        BadInput, match=r"policy\.lora\.rank: expected at most \d+, the smaller side of model\.layers\.0"
    ):
        adapted_layers(model_dir, [], 1024)


def test_the_configuration_alone_refuses_the_same(model_dir: Path, tmp_path: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    require_adaptable(tmp_path, ["q_proj", "mlp.up_proj"], 4)
    require_adaptable(tmp_path, [], 4)
    for targets, rank in ((["query"], 4), ([], 1024)):
        with pytest.raises(BadInput) as by_weights:
            adapted_layers(model_dir, targets, rank)
        with pytest.raises(BadInput) as by_configuration:
            require_adaptable(tmp_path, targets, rank)
        assert str(by_configuration.value) == str(by_weights.value)
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "unknown"}))
    require_adaptable(tmp_path, ["query"], 1024)
