"""Models that an engine can quantize in blocks of 128."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rljob_client.errors import BadInput
from rljob_trainer.models.block_sizes import require_whole_blocks


def model(directory: Path, hidden: int, heads: int, width: int, head_dim: int | None = None) -> Path:
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": width, "head_dim": head_dim}
    (directory / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], **sizes}))
    return directory


@pytest.mark.parametrize(
    ("sizes", "tensor_parallel_size", "found"),
    [
        ((1024, 16, 3072, 128), 1, None),  # Qwen3-0.6B
        ((896, 14, 4864), 1, None),  # Qwen2.5-0.5B
        ((896, 14, 4864), 2, "num_attention_heads x head_dim: 448 in each of 2 processes"),
        ((576, 9, 1536), 1, "hidden_size: 576, num_attention_heads x head_dim: 576; write Fp8PerChannel"),  # SmolLM2
        ((4096, 32, 11_008), 4, "intermediate_size: 2752 in each of 4 processes; write"),  # Llama 2
    ],
)
def test_the_inputs_of_every_process_are_whole_blocks(
    sizes: tuple[int, ...], tensor_parallel_size: int, found: str | None, tmp_path: Path
) -> None:
    directory = model(tmp_path, *sizes)
    if found is None:
        require_whole_blocks(directory, tensor_parallel_size)
        return
    with pytest.raises(BadInput, match=f"multiples of 128 inputs for Fp8PerBlock, found {found}"):
        require_whole_blocks(directory, tensor_parallel_size)


def test_a_configuration_without_the_sizes_is_left_to_vllm(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Another"]}))
    require_whole_blocks(tmp_path, 1)
