"""Sizes by which an engine can divide a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rljob_client.errors import BadInput
from rljob_trainer.models.sharding import require_shardable


def model(directory: Path, heads: int, kv_heads: int | None, width: int) -> Path:
    settings = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": width}
    (directory / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], **settings}))
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
    directory = model(tmp_path, heads, kv_heads, width)
    for size in range(1, 65):
        if size in possible:
            require_shardable(directory, size)
        else:
            with pytest.raises(BadInput, match=rf"found {size}; write 1 or "):
                require_shardable(directory, size)


def test_the_message_names_heads_and_sizes(tmp_path: Path) -> None:
    message = "to suit the model's 14 attention heads, 2 key-value heads and MLP of 4864, found 4; write 1 or 2$"
    with pytest.raises(BadInput, match=message):
        require_shardable(model(tmp_path, 14, 2, 4864), 4)


def test_a_configuration_without_the_numbers_is_left_to_vllm(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Another"]}))
    require_shardable(tmp_path, 3)
